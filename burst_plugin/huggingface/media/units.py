"""The inputs of a tower as units, which it encodes independently of each other: images, tiles, frames, clips.

pixel_values [patches of all images, ...], image_grid_thw [images, 3]     patches of one image follow each other
pixel_values [images, ...], others [images, ...]                          one unit each
pixel_values [1, 3, P, P * patches of all images], target_sizes [images, 2]   likewise
pixel_values [crops of all images, ...], image_token_pooling [tokens, 4], image_grids [images, 4]      likewise
pixel_values [rows, images, 3, H, W]                                      one unit each, images of zeros left out
pixel_values [images, ...], pixel_values_local [views of all images, ...] one unit each, as num_local_patches says
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_plugin.towers.sharing import work_of

_VIEWS, _NUMBERS_OF_VIEWS = "pixel_values_local", "num_local_patches"


class Units(NamedTuple):
    """The units that one call of a tower would encode, such as images, which can be shared out between ranks.

    patches: the size of each unit, to compare their work by: its number of patches, or of crops or input values where
        a call has no patches.
    take: returns the keyword arguments of a call that encodes only the units with given indices, which ascend.
    in_proportion: whether the number of features of a unit is in proportion to its patches. It need not be where
        masks or lengths decide how many features are left.
    """

    patches: list[int]
    take: Callable[[Sequence[int]], dict[str, Any]]
    in_proportion: bool = True

    @property
    def smallest(self) -> int:
        """Return the index of the unit with the fewest patches, for a rank that has no unit of its own to encode."""
        return min(range(len(self.patches)), key=self.patches.__getitem__)

    def work(self, width: int) -> list[float]:
        """Return an estimate of each unit's work, in proportion to FLOPs, in a tower of hidden size `width`."""
        return [work_of(patches, width) for patches in self.patches]


def units_of(name: str, given: Mapping[str, Any], by_frame: bool, by_row: bool = False) -> Units:
    """Return the units, such as images, that a call of a tower would encode, given its arguments.

    Args:
        name: the name of the argument with the pixels, or with features of sound.
        given: the arguments of the call by name.
        by_frame: whether the frames of a video are units of their own.
        by_row: whether images are given by batch row, as many as the row with most images has, filled up with zeros.

    Raises:
        ValueError: numbers or sizes of images in the arguments do not fit together.
    """
    pixels = given[name]
    if by_row and isinstance(pixels, Tensor):
        return _of_rows(name, given)
    pooling = next((key for key in given if key.endswith("_token_pooling")), None)
    if pooling is not None:
        return _of_crops(name, pooling, given, by_frame)
    grid_name = next((key for key in given if "grid" in key and isinstance(given[key], Tensor)), None)
    if grid_name is not None and int(given[grid_name].prod(-1).sum()) == len(pixels):
        return _of_patches(name, grid_name, given, by_frame)
    if grid_name is not None and len(given[grid_name]) != len(pixels):
        raise ValueError(
            f"{grid_name} says that there are {int(given[grid_name].prod(-1).sum())} patches, but {name} has "
            f"{len(pixels)}: give the grids of these images"
        )
    strip = next((key for key in given if key.startswith("target_sizes")), None)
    if strip is not None:
        return _of_strip(name, strip, given)
    count, sizes = len(pixels), given.get("image_sizes")
    if sizes is not None and len(sizes) != count:
        raise ValueError(
            f"image_sizes has {len(sizes)} sizes, but {name} has {count} images: give the sizes of these images"
        )
    if _VIEWS in given and given.get(_NUMBERS_OF_VIEWS) is not None:
        return _of_views(name, given)
    if given.get("batch_num_images") is not None:
        _check_numbers_by_text([int(number) for number in given["batch_num_images"]])
    others = [value for key, value in given.items() if key != name]
    return Units(
        [pixels[0].numel() if count else 1] * count
        if isinstance(pixels, Tensor)
        else [image.numel() for image in pixels],
        lambda numbers: {key: _picked(value, count, numbers) for key, value in given.items()},
        not any(isinstance(value, Tensor | list | tuple) and len(value) == count for value in others),
    )


def _check_numbers_by_text(numbers: Sequence[int]) -> None:
    """Raise ValueError if some texts of a batch have one image and others several, given their numbers of images."""
    if len({number == 1 for number in numbers}) > 1:
        raise ValueError(
            f"batch_num_images={numbers} has texts with one image, which is cut into tiles, beside texts with "
            "several, which are not, so that ranks cannot share them; make batches of either kind"
        )


def _of_views(name: str, arguments: Mapping[str, Any]) -> Units:
    """Return images with closer views of their parts, which follow each other, in numbers that may be 0."""
    pixels, views = arguments[name], arguments[_VIEWS]
    counts = [int(count) for count in arguments[_NUMBERS_OF_VIEWS]]
    view_count = 0 if views is None else len(views)
    if len(counts) != len(pixels) or sum(counts) != view_count:
        raise ValueError(
            f"{_NUMBERS_OF_VIEWS}={counts} does not fit {len(pixels)} images in {name} and {view_count} views in "
            f"{_VIEWS}: give the numbers of these images"
        )
    ends = [*accumulate(counts, initial=0)]

    def take(numbers: Sequence[int]) -> dict[str, Any]:
        taken = {key: _picked(value, len(counts), numbers) for key, value in arguments.items() if key != _VIEWS}
        of_views = [] if views is None else [views[ends[n] : ends[n + 1]] for n in numbers]
        return {
            **taken,
            _VIEWS: torch.cat(of_views) if any(map(len, of_views)) else None,
            _NUMBERS_OF_VIEWS: [counts[n] for n in numbers],
        }

    size = pixels[0].numel() if counts else 1
    of_view = views[0].numel() if view_count else 0
    return Units([size + count * of_view for count in counts], take, in_proportion=False)


def _of_patches(name: str, grid_name: str, arguments: Mapping[str, Any], by_frame: bool) -> Units:
    """Return units whose patches follow each other, as grids say."""
    grid = arguments[grid_name]
    if by_frame and grid.shape[1] == 3:
        frames = grid.repeat_interleave(grid[:, 0], 0)
        grid = torch.cat([torch.ones_like(frames[:, :1]), frames[:, 1:]], 1)
    patches = grid.prod(-1).tolist()
    ends = [*accumulate(patches, initial=0)]

    def take(numbers: Sequence[int]) -> dict[str, Any]:
        rows = torch.cat([torch.arange(ends[n], ends[n + 1], device="cpu") for n in numbers])
        taken = {}
        for key, value in arguments.items():
            if key == grid_name:
                taken[key] = grid[list(numbers)]
            elif isinstance(value, Tensor) and value.dim() and len(value) == ends[-1]:
                taken[key] = value[rows.to(value.device)]
            else:
                taken[key] = _picked(value, len(patches), numbers)
        return taken

    return Units(patches, take)


def _of_crops(name: str, pooling_name: str, arguments: Mapping[str, Any], by_frame: bool) -> Units:
    """Return images of several crops each, or frames of one, whose patches a model pools into tokens.

    Pooling [tokens, patches of each] has numbers of patches of all crops, -1 for none. Grids tell the tokens: of
    images [images, 4], two grids each, and of videos [videos, 3].
    """
    grid_name = pooling_name.replace("_token_pooling", "_grids")
    crops, pooling, grid = arguments[name], arguments[pooling_name], arguments[grid_name]
    if by_frame and grid.shape[1] == 3:
        frames = grid.repeat_interleave(grid[:, 0], 0)
        grid = torch.cat([torch.ones_like(frames[:, :1]), frames[:, 1:]], 1)
    tokens = (grid[:, 0] * grid[:, 1] + grid[:, 2] * grid[:, 3] if grid.shape[1] == 4 else grid.prod(-1)).tolist()
    wide = crops.shape[1]
    if sum(tokens) != len(pooling):
        raise ValueError(
            f"{grid_name} says that there are {sum(tokens)} tokens, but {pooling_name} has {len(pooling)}: give the "
            "grids of these images"
        )
    pools = pooling.split(tokens)
    starts = [0, *(int(pool.max()) // wide + 1 for pool in pools)]  # an image's last crop has a patch in use
    if starts[-1] != len(crops):
        raise ValueError(
            f"{pooling_name} has patches of {starts[-1]} crops of {wide}, but {name} has {len(crops)} crops: give "
            "those of these images"
        )

    def take(numbers: Sequence[int]) -> dict[str, Any]:
        taken, moved, at = [], [], 0
        for n in numbers:
            taken.append(crops[starts[n] : starts[n + 1]])
            moved.append(torch.where(pools[n] >= 0, pools[n] + (at - starts[n]) * wide, pools[n]))
            at += starts[n + 1] - starts[n]
        return {**arguments, name: torch.cat(taken), pooling_name: torch.cat(moved), grid_name: grid[list(numbers)]}

    return Units([b - a for a, b in pairwise(starts)], take, in_proportion=False)


def _of_strip(name: str, sizes_name: str, arguments: Mapping[str, Any]) -> Units:
    """Return images whose patches follow each other in a strip, [1, C, P, P * patches], of sizes [images, 2]."""
    strip, sizes = arguments[name], arguments[sizes_name]
    patches = sizes.prod(-1).tolist()
    wide, side = strip.shape[-1], strip.shape[-2]
    if len(strip) != 1 or wide != side * sum(patches):
        raise ValueError(
            f"{sizes_name} says that there are {sum(patches)} patches, but {name} has {wide // side} in each of its "
            f"{len(strip)} rows: give one row, and the sizes of these images"
        )
    ends = [*accumulate(patches, initial=0)]

    def take(numbers: Sequence[int]) -> dict[str, Any]:
        parts = [strip[..., side * ends[n] : side * ends[n + 1]] for n in numbers]
        return {**arguments, name: torch.cat(parts, -1), sizes_name: sizes[list(numbers)]}

    return Units(patches, take)


def _of_rows(name: str, arguments: Mapping[str, Any]) -> Units:
    """Return the images of all rows, each as a row of its own."""
    pixels = arguments[name].flatten(0, 1)
    real = (pixels != 0).flatten(1).any(1).nonzero().flatten()
    real = real if len(real) else torch.zeros(1, dtype=torch.int64, device=pixels.device)
    rows = arguments[name].shape[:2]

    def take(numbers: Sequence[int]) -> dict[str, Any]:
        taken = real[list(numbers)]
        return {
            key: value.flatten(0, 1)[taken].unsqueeze(1)
            if isinstance(value, Tensor) and value.shape[:2] == rows
            else value
            for key, value in arguments.items()
        }

    return Units([pixels[0].numel()] * len(real), take)


def _picked(value: Any, count: int, numbers: Sequence[int]) -> Any:
    """Return the entries of some units from an argument with one entry per unit; other arguments as they are."""
    if isinstance(value, Tensor) and value.dim() and len(value) == count:
        return value[torch.tensor(numbers, device=value.device)]
    is_option = isinstance(value, list | tuple) and all(isinstance(each, int | float | str) for each in value)
    if isinstance(value, list | tuple) and len(value) == count and not is_option:
        return type(value)(value[n] for n in numbers)
    return value
