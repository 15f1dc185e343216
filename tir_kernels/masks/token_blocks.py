"""The division of a length into blocks of tokens: consecutive tokens, or tokens at a distance of `stride`.

With stride s the tokens are sorted by their residue modulo s: position p of class c is token c + s * p.  Each class is
padded to whole blocks, so a block is an arithmetic progression of tokens, and block b of a class starts at token
c + s * b * block.  A strided or dilated pattern keeps something in every block of consecutive tokens, but of these
blocks it keeps a few whole ones.  stride = 1 is the usual order.
"""

import numpy as np


def n_token_blocks(length: int, block: int, stride: int = 1) -> int:
    """Number of blocks of `block` tokens that a length is cut into; each of the `stride` classes has equally many."""
    return stride * _blocks_in_class(length, block, stride)


def first_tokens(length: int, block: int, stride: int = 1) -> np.ndarray:
    """int64 (blocks,): the first token of each block.  It lies past the length if a class has fewer tokens."""
    number, start = np.divmod(np.arange(n_token_blocks(length, block, stride)), _blocks_in_class(length, block, stride))
    return number + start * block * stride


def token_counts(length: int, block: int, stride: int = 1) -> np.ndarray:
    """int64 (blocks,): how many of each block's tokens lie within the length, 0 … block."""
    return np.clip(-(-(length - first_tokens(length, block, stride)) // stride), 0, block)


def positions(length: int, block: int, stride: int = 1) -> np.ndarray:
    """int64 (length,): where each token stands when the blocks are laid one after another."""
    position, number = np.divmod(np.arange(length), stride)
    return number * _blocks_in_class(length, block, stride) * block + position


def _blocks_in_class(length, block, stride):
    return -(-length // (block * stride))
