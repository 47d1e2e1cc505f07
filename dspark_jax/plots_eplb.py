"""Plots of expert load. matplotlib is imported when the first one is drawn: `pip install dspark-jax[notebooks]`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dspark_jax.eplb.report import LoadReport
from dspark_jax.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_rank_loads(reports: Mapping[str, LoadReport], *, num_target_layers: int | None = None) -> "Figure":
    """Heat maps of each rank's load over the mean of its layer, one a report, under a shared scale.

    Args:
      reports: by title, all of the same layers.
      num_target_layers: draws a line above the draft stages, the layers from this index on.

    Raises ImportError without matplotlib.
    """
    try:
        from matplotlib.colors import TwoSlopeNorm
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib; install it with: pip install 'dspark-jax[notebooks]'") from error
    relative = {title: _relative(report.loads) for title, report in reports.items()}
    peak = max(1.01, *(float(values.max()) for values in relative.values()))
    norm = TwoSlopeNorm(1, 0, peak)  # the mean is white
    layers = next(iter(reports.values())).layers
    figure = Figure(figsize=(1.2 + 4 * len(reports), 1.2 + max(2.0, 0.14 * len(layers))), dpi=100, layout="constrained")
    panels = figure.subplots(1, len(reports), sharey=True, squeeze=False)[0]
    image = None
    for axes, (title, values) in zip(panels, relative.items(), strict=True):
        image = axes.imshow(values, aspect="auto", cmap="RdBu_r", norm=norm, interpolation="nearest")
        axes.set(title=f"{title}: imbalance in sum {reports[title].overall()['total']:.3f}", xlabel="expert rank")
        axes.xaxis.get_major_locator().set_params(integer=True)
        first_stage = None if num_target_layers is None else _first(layers, num_target_layers)
        if first_stage:
            axes.axhline(first_stage - 0.5, color="black", linewidth=1)
    step = -(-len(layers) // 24)
    panels[0].set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    panels[0].set_ylabel("layer")
    if image is not None:
        figure.colorbar(image, ax=list(panels), label="load / mean of the layer")
    return figure


def save_figure(figure: "Figure", path: Path) -> None:
    """Writes the picture in the format of the file's ending.

    Raises ConfigError for an ending that matplotlib does not know, or a path that cannot be written.
    """
    formats = sorted(figure.canvas.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in formats:
        raise ConfigError(f"{path}: the ending is {path.suffix!r}; expected that of a picture: {', '.join(formats)}")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); check the path") from error


def _relative(loads: np.ndarray) -> np.ndarray:
    """Each load over its layer's mean; 1 in a layer without load."""
    mean = loads.mean(axis=1, keepdims=True)
    return np.where(mean > 0, loads / np.where(mean > 0, mean, 1), 1)


def _first(layers: tuple[int, ...], index: int) -> int | None:
    return next((row for row, layer in enumerate(layers) if layer >= index), None)
