"""JAX pytrees under a worker."""

from __future__ import annotations

import math

import numpy as np
import pytest
from worker_support import Coordinator, adopted_round

import flodl_fast as ff

jax = pytest.importorskip("jax", reason="JAX is not installed: make test-frameworks")
