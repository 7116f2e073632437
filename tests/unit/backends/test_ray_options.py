"""What a run may ask of Ray."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline_backend import backends
from paceline_backend.backends.ray import Ray
from paceline_backend.store.new_runs import NewRun

NEW = NewRun("train", "/shared/train.py", 2, "bsp", backend="ray", nodes_min=2, nodes_max=4)


@pytest.mark.parametrize(
    "options, field, words",
    [
        ({"cpus_per_node": 0}, "backend_options.cpus_per_node", ">= 1"),
        ({"gpus_per_node": -1}, "backend_options.gpus_per_node", ">= 0"),
        ({"memory": "16G"}, "backend_options.memory", "int"),
        ({"address": "http://elsewhere"}, "backend_options", "the options are: server, cpus_per"),
        ({"resources": {"TPU": 0}}, "backend_options.resources[...]", "> 0"),
        ({"resources": {"GPU": 1}}, "backend_options.resources", "GPU: give gpus_per_node"),
        ({"resources": {"memory": 1}}, "backend_options.resources", "memory: give memory"),
        ({"setup": "a\0b"}, "backend_options.setup", "regex"),
        ({"runtime_env": {"working_dir": "/x"}}, "backend_options.runtime_env.working_dir", "cwd"),
        ({"runtime_env": {"env_vars": {"A": 1}}}, "backend_options.runtime_env.env_vars", "string"),
        ({"runtime_env": {"env_vars": ["A"]}}, "backend_options.runtime_env.env_vars", "object"),
    ],
)
def test_options_that_ray_does_not_take(options: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(backends.NewRunError) as refused:
        Ray().check(replace(NEW, backend_options=options), launch=True)
    assert refused.value.field == field
    assert words in refused.value.message


def test_options_that_ray_takes() -> None:
    options = {
        "cpus_per_node": 8,
        "gpus_per_node": 2,
        "memory": 1 << 34,
        "resources": {"accelerator_type:H100": 0.001},
        "runtime_env": {"pip": ["paceline"], "env_vars": {"NCCL_DEBUG": "INFO"}},
    }
    Ray().check(replace(NEW, backend_options=options), launch=True)


def test_ray_is_an_engine() -> None:
    with pytest.raises(backends.NewRunError, match="env"):
        Ray().check(replace(NEW, env={"A": "1"}), launch=True)
    assert isinstance(backends.engine("ray"), Ray)
