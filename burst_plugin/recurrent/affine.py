"""What a piece of a sequence does to the state that enters it, and how two pieces make one.

A state S [..., K, V] becomes A S + B, with a matrix A [..., K, K] or with numbers A that broadcast over S. The
largest of some exponents goes along a sequence likewise, with max in place of + and + in place of a product.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Affine(ABC):
    """The algebra of one kind of map S -> A S + B on states, without data of its own."""

    name: str
    has_gradients = True

    @abstractmethod
    def apply(self, transition: Tensor, state: Tensor) -> Tensor:
        """Return A S, the state after a transition A."""

    @abstractmethod
    def add(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the sum of two states, in a new tensor."""

    @abstractmethod
    def compose(self, late: Tensor, early: Tensor) -> Tensor:
        """Return the transition that applies `early` first and then `late`."""

    @abstractmethod
    def apply_transposed(self, transition: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of S from the gradient of A S."""

    @abstractmethod
    def grad_of_transition(self, grad: Tensor, state: Tensor, like: Tensor) -> Tensor:
        """Return the gradient of A, in the shape of `like`, from the gradient of A S."""

    def through(self, transition: Tensor, bias: Tensor, state: Tensor) -> Tensor:
        """Return A S + B, the state after a piece."""
        return self.add(self.apply(transition, state), bias)


class _Matrix(Affine):
    name = "matrix"

    def apply(self, transition: Tensor, state: Tensor) -> Tensor:
        return transition @ state

    def add(self, one: Tensor, other: Tensor) -> Tensor:
        return one + other

    def compose(self, late: Tensor, early: Tensor) -> Tensor:
        return late @ early

    def apply_transposed(self, transition: Tensor, grad: Tensor) -> Tensor:
        return transition.mT @ grad

    def grad_of_transition(self, grad: Tensor, state: Tensor, like: Tensor) -> Tensor:
        return grad @ state.mT


class _Elementwise(Affine):
    name = "elementwise"

    def apply(self, transition: Tensor, state: Tensor) -> Tensor:
        return transition * state

    def add(self, one: Tensor, other: Tensor) -> Tensor:
        return one + other

    def compose(self, late: Tensor, early: Tensor) -> Tensor:
        return late * early

    def apply_transposed(self, transition: Tensor, grad: Tensor) -> Tensor:
        return transition * grad

    def grad_of_transition(self, grad: Tensor, state: Tensor, like: Tensor) -> Tensor:
        return (grad * state).sum_to_size(like.shape)


class _Largest(_Elementwise):
    """max(A + S, B): the largest exponent so far, which has no gradient."""

    name = "largest"
    has_gradients = False

    def apply(self, transition: Tensor, state: Tensor) -> Tensor:
        return transition + state

    def add(self, one: Tensor, other: Tensor) -> Tensor:
        return torch.maximum(one, other)

    def compose(self, late: Tensor, early: Tensor) -> Tensor:
        return late + early


MATRIX, ELEMENTWISE, LARGEST = _Matrix(), _Elementwise(), _Largest()
