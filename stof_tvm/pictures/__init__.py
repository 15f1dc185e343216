"""Pictures, with matplotlib (`pip install "stof-tvm[viz]"`), readable on light and on dark pages.

    from stof_tvm import masks, pictures
    pictures.save(pictures.block_mask(masks.bigbird(), 1024), "bigbird.svg")
    pictures.save(pictures.tuning_curves({"BERT": result.report.curve()}), "tuning.png")

All return matplotlib Figures with a transparent background.
"""

from stof_tvm.pictures.bars import latency_bars
from stof_tvm.pictures.curves import tuning_curves
from stof_tvm.pictures.mask_blocks import block_mask
from stof_tvm.pictures.roof import roofline
from stof_tvm.pictures.style import save

__all__ = ["block_mask", "latency_bars", "roofline", "save", "tuning_curves"]
