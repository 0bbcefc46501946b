"""Draw the pictures of the gallery by running the examples; takes about a minute on two idle cores.

    python docs/pictures.py [digits] [gan] [contrastive]

The example of large batches draws its own: `python examples/large_batch.py --plot docs/large-batch.png`.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

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


PICTURES = {"digits": digits, "gan": gan, "contrastive": contrastive}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()
