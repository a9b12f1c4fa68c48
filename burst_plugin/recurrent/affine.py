"""Maps of states: what a piece of a sequence does to the state that enters it, and how two such maps make one.

A state S [..., K, V] becomes A S + B, with a matrix A [..., K, K] or with numbers A that broadcast over S. Running
maxima of exponents go along a sequence likewise: an exponent S becomes max(A + S, B).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Affine(ABC):
    """The algebra of one kind of map S -> A S + B on states: how to apply, compose and differentiate such maps.

    It holds no data. A is called the transition, B the bias. There are three, `MATRIX`, `ELEMENTWISE` and `LARGEST`:
    in `LARGEST` A + S takes the place of the product and a maximum the place of the sum; it has no gradients.

    name: the kind of map, for descriptions of passes.
    """

    name: str
    has_gradients = True

    @abstractmethod
    def apply(self, transition: Tensor, state: Tensor) -> Tensor:
        """Return A S, from A (`transition`) and S (`state`)."""

    @abstractmethod
    def add(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the sum of two states, of exponents their maximum, in a new tensor."""

    @abstractmethod
    def compose(self, late: Tensor, early: Tensor) -> Tensor:
        """Return the transition that applies `early` first and then `late`."""

    @abstractmethod
    def apply_transposed(self, transition: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of S, from A (`transition`) and the gradient of A S (`grad`)."""

    @abstractmethod
    def grad_of_transition(self, grad: Tensor, state: Tensor, like: Tensor) -> Tensor:
        """Return the gradient of A, in the shape of `like`, from the gradient of A S (`grad`) and S (`state`)."""

    def through(self, transition: Tensor, bias: Tensor, state: Tensor) -> Tensor:
        """Return A S + B, the state after a piece, from A (`transition`), B (`bias`) and S (`state`)."""
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
