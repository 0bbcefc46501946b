"""Write the pages of differences from the list that the replayed traces of the originals are checked against.

python docs/differences.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "tests" / "reference" / "differences.toml"
DOCS = ROOT / "docs"

PAGES = {"differences.md": ("chainer-cunn", "chainer-edges"), "differences-mxnet-nnabla.md": ("mxnet-nnabla",)}
"""The folders of traces that each page is about."""

TITLES = {"differences.md": "Chainer and Torch7", "differences-mxnet-nnabla.md": "MXNet and NNabla"}

HEAD = """# Deliberate differences from {title}

`tests/reference` replays traces that were recorded by running Chainer 7.8.1, cunn of Torch7, MXNet and NNabla.
lockstep agrees with all of them within the stated tolerances, except for the differences on this page and on that of
[{other_title}]({other}). `tests/reference/differences.toml` lists them, and the tests check each of them: the value of
lockstep must be the listed one, and must differ from that of the original. After each reason, this page names the cases
of the trace and their fields. `python docs/differences.py` writes it.
"""

BESIDE = {
    "differences.md": """## Beside the traces

No trace shows these differences from the originals, and from other libraries for training:

* With `accumulate`, an update may take its batches across the end of an epoch. Accelerate and Lightning end an
  accumulation there by default, with fewer batches.
* If the iterator ends for good and leaves fewer batches than `accumulate`, the last update is the mean over the samples
  that it has. A loop that divides each loss by the nominal number of batches makes a smaller step instead.
* `lockstep.triggers.Time` refuses a period of 0. That of Chainer then fires at every update. Negative learning rates
  and decay rates, and a momentum of 1 or more, are refused as well; Chainer accepts any number.
* `GradientLARS` and the clipping of norms compute norms of half-precision gradients in float32. Those of Chainer
  are rounded to half precision, where a small norm can become 0 and the weights NaN.
* In half precision, a loss scale that is no power of two has no error of its own. Chainer rounds the scale for backward
  and divides by the exact one, so that all gradients have the same error, up to 1/2048.
* The state of `EarlyStopping` is saved. That of Chainer starts again when a run is resumed.
* A run that is resumed at or beyond its end does nothing. Chainer continues to the next multiple of the period.
* If an extension raises before the first update, `on_error` and `finalize` are called; Chainer calls neither. They are
  not called for an extension that was not initialized because its trigger has finished; Chainer calls them.
* `main/loss` is the mean over the whole batch. With Chainer's `ParallelUpdater` it is the loss of the main device's
  part, and each other device has its own, such as `second/loss`.
* `LogReport` and `Evaluator` weight values by samples, and `LogReport` logs the last learning rate of an interval.
  Chainer averages over updates and batches, so that a short last batch counts as much as a full one.
* `ParameterStatistics` observes the statistics of one update, and zeros as a fraction. Chainer observes the mean over
  the updates of an interval, and the number of zeros.
* Under autocast, the outputs of the model are not cast back to float32 before the loss function gets them. Accelerate
  converts the outputs of a prepared model.
* If an update is a mean over several shards, backward of each starts with its share of the samples times the loss
  scale. If the loss function returns weights, it starts with the weight times the loss scale instead, divided by the
  smallest power of two that is not below the number of samples of the update, and hooks see gradients at that scale.
* The main device gets the first part of a batch, and the others follow in order. In Chainer, a main model that is not
  the first of `models` gets the part of its position.
* A parameter that two layers share is updated once. Chainer updates it once per link, and also adds the gradients of
  replicas as often.
* `concat_examples` returns a list for samples that are lists, as it returns a tuple for tuples. Chainer's joins them in
  one array.
* A period in iterations is a whole number. Chainer accepts fractions.
* `DataParallelTable.backward` runs once per forward, before the weights change. That of Torch7 can be repeated, and
  uses the current weights.
* Outputs of a `DataParallelTable` have a row for each sample, or with `table.output_dim = None` one value, which is
  averaged. All tensors of an input have equally many rows. Torch7 splits and joins tensors of any sizes.
* Running statistics of a `DataParallelTable` are combined over devices. In Torch7 each replica has its own, and those
  of the first are saved.
""",
    "differences-mxnet-nnabla.md": """## Beside the traces

No trace shows these differences from the originals:

* A loss of MXNet that is one number is taken for a mean over samples: its gradient is the mean over devices, weighted
  by their samples. If the loss is a sum over samples, this gradient depends on the devices; a warning tells if the last
  operation of the model is the sum. Return one loss for each sample instead, and pass `backward` a gradient of ones.
  The original adds up the gradients of devices.
* For a loss for each sample, `backward` requires the gradient. That of MXNet's `MakeLoss` is one for each sample.
* A batch with more arrays than descriptions is refused. MXNet ignores the surplus arrays.
* In a list with one batch per device, an array without a dimension for samples is the same in all batches. In MXNet,
  each device has its own.
* A loss of NNabla's updater has one element. The original starts backward with the loss scale for each element, which
  is the gradient of their sum: return `loss.sum()`.
""",
}
"""What is told at the end of a page without a trace."""

THROUGH = {"core": "but not through `lockstep.compat`", "compat": "through `lockstep.compat` only"}
"""An entry may apply to one of two replays of a trace."""

Entry = dict[str, Any]


def page(name: str, source: Path = SOURCE) -> str:
    """Return a page: for each trace file the reasons, with their cases and fields."""
    entries: list[Entry] = tomllib.loads(source.read_text(encoding="utf-8"))["difference"]
    (other,) = [each for each in PAGES if each != name]
    lines = [HEAD.format(title=TITLES[name], other_title=TITLES[other], other=other)]
    for file in sorted({entry["file"] for entry in entries if entry["file"].split("/")[0] in PAGES[name]}):
        lines += [f"## `{file}`", ""]
        reasons: dict[str, list[Entry]] = {}
        for entry in entries:
            if entry["file"] == file:
                reasons.setdefault(entry["reason"].strip(), []).append(entry)
        lines += [f"* {reason} ({places_of(listed)})" for reason, listed in reasons.items()]
        lines += [""]
    return "\n".join([*lines, BESIDE[name]] if name in BESIDE else lines)


def places_of(entries: list[Entry]) -> str:
    """Return the cases of some entries, each with its fields."""
    fields: dict[str, list[str]] = {}
    for entry in entries:
        only = f", {THROUGH[entry['through']]}" if "through" in entry else ""
        fields.setdefault(cases_of(entry), []).append(f"`{entry['field']}`{only}")
    return "; ".join(f"{cases or 'all cases'}: {', '.join(dict.fromkeys(named))}" for cases, named in fields.items())


def cases_of(entry: Entry) -> str:
    """Return the cases of an entry: their name, or the values that they contain."""
    held = [f"`{place} = {value}`" for place, value in entry.get("where", {}).items()]
    return " and ".join([f"`{entry['case']}`", *held] if "case" in entry else held)


if __name__ == "__main__":
    for each in PAGES:
        (DOCS / each).write_text(page(each), encoding="utf-8")
