"""Draw the pictures of the gallery and the tutorial by running their programs; about a minute on two idle cores.

    python docs/pictures.py [digits] [gan] [contrastive] [tutorial]

The example of large batches draws its own: `python examples/large_batch.py --plot docs/large-batch.png`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import lockstep as ls

DOCS = Path(__file__).resolve().parent
IMAGES = DOCS / "images"
sys.path.insert(0, str(DOCS.parent / "examples"))


def digits() -> None:
    """Draw the loss and the accuracy of the digits."""
    example = importlib.import_module("digits")
    with tempfile.TemporaryDirectory() as folder:
        example.train("1", seed=0, epochs=example.EPOCHS, precision="fp32", out=Path(folder))
        (IMAGES / "digits.png").write_bytes(Path(folder, "curve.png").read_bytes())


def gan() -> None:
    """Draw the points that the generator makes after some numbers of updates."""
    example = importlib.import_module("gan")
    updater = example.build(["cpu", "cpu"])
    noise = torch.randn(400, example.LATENT, generator=torch.Generator().manual_seed(0))
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    for axes, updates in zip(figure.subplots(1, 4), [0, 200, 600, 1200], strict=True):
        while updater.iteration < updates:
            updater.update()
        generator = updater.get_all_models()["gen"].eval()
        with torch.no_grad():
            x, y = generator(noise).T
        generator.train()
        axes.scatter(*torch.stack(list(example.circle(256)[:])).reshape(-1, 2).T, s=4, color="#c8ccd4")
        axes.scatter(x, y, s=4, color="#2563a8")
        axes.set(title=f"{updates} updates", xlim=(-1.6, 1.6), ylim=(-1.6, 1.6), aspect="equal", xticks=[], yticks=[])
    updater.finalize()
    figure.savefig(IMAGES / "gan.png", dpi=90)


def contrastive() -> None:
    """Draw the features of test images before and after training, projected to the two main directions."""
    example = importlib.import_module("contrastive")
    images, labels = example.load_images()
    encoder: ls.DataParallel = example.build(["cpu", "cpu"])
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    before, after = figure.subplots(1, 2)
    for axes, title, epochs in ((before, "before training", 0), (after, "after 20 epochs, without labels", 20)):
        example.train(encoder, images[example.NUM_TEST :], epochs)
        with torch.no_grad():
            features = torch.nn.functional.normalize(encoder(images[: example.NUM_TEST])["features"].cpu(), dim=1)
        centred = features - features.mean(dim=0)
        x, y = (centred @ torch.linalg.svd(centred).Vh[:2].T).T
        drawn = axes.scatter(x, y, s=8, c=labels[: example.NUM_TEST], cmap="tab10")
        axes.set(title=title, xticks=[], yticks=[])
    figure.colorbar(drawn, ax=[before, after], label="digit", ticks=range(10))
    figure.savefig(IMAGES / "contrastive.png", dpi=90)


def tutorial() -> None:
    """Draw what the network of the tutorial has learned after 6 epochs, and its log."""
    page = (DOCS / "get-started" / "tutorial.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.argv = ["train.py", "6", "2"]
        exec(compile(page.split("```python\n")[1].split("```")[0], "train.py", "exec"), names)  # noqa: S102 - our page
        log = [json.loads(line) for line in Path("runs/moons/log.jsonl").read_text(encoding="utf-8").splitlines()]
        os.chdir(DOCS)
    points, labels, model = names["points"][1000:], names["labels"][1000:], names["model"].eval()
    x, y = torch.meshgrid(torch.linspace(-1.5, 2.5, 200), torch.linspace(-1.2, 1.7, 150), indexing="xy")
    with torch.no_grad():
        probability = model(torch.stack([x, y], dim=-1)).softmax(dim=-1)[..., 1]
    figure = Figure(figsize=(9, 3), layout="constrained")
    plane, losses, accuracies = figure.subplots(1, 3)
    plane.contourf(x, y, probability, levels=[0, 0.25, 0.5, 0.75, 1], cmap="coolwarm", alpha=0.4)
    plane.scatter(*points.T, s=6, c=labels, cmap="coolwarm")
    plane.set(title="test points and predictions", xticks=[], yticks=[])
    epochs = [entry["epoch"] for entry in log]
    for axes, name in ((losses, "main/loss"), (accuracies, "validation/main/accuracy")):
        axes.plot(epochs, [entry[name] for entry in log], marker="o", color="#2563a8")
        axes.set(title=name, xlabel="epoch")
        axes.grid(alpha=0.3)
    figure.savefig(IMAGES / "tutorial.png", dpi=90)


PICTURES = {"digits": digits, "gan": gan, "contrastive": contrastive, "tutorial": tutorial}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()
