"""A recipe is resolved to what the device supports, and says so in a form that can be recorded."""

from dataclasses import replace

import pytest
import torch

from nanorun.config import scale_model
from nanorun.errors import UserError
from nanorun.model.fast import recipe as recipes
from nanorun.model.fast.recipe import PLAIN_RECIPE, Recipe, consistent, default_fp8, resolve

CPU = torch.device("cpu")


def test_fp8_is_the_default_where_it_was_measured_to_pay():
    wide, narrow = scale_model(12, 500), scale_model(4, 500)
    assert default_fp8(wide, pays=True) == "all"
    assert default_fp8(wide, pays=False) == default_fp8(narrow, pays=True) == "none"


def test_on_a_cpu_the_plain_model_computes_everything():
    found = resolve(Recipe(recompute=True), scale_model(12, 500), CPU, torch.float32)
    assert found == replace(PLAIN_RECIPE, recompute=True)
    assert found.is_plain


def test_fp8_that_is_asked_for_must_be_possible_and_a_recorded_one_need_not():
    with pytest.raises(UserError, match="--fp8 none"):
        resolve(Recipe(fp8="all"), scale_model(12, 500), CPU, torch.bfloat16)
    assert resolve(Recipe(fp8="all"), scale_model(12, 500), CPU, torch.bfloat16, strict=False).fp8 == "none"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"fp8": "all", "fused_loss": False}, {"fp8": "layers", "fused_loss": False}),
        (
            {"fp8": "layers", "fused_rope": False},
            {"fp8": "mlp", "fused_rope": False, "fused_residual": False},
        ),
        (
            {"fp8": "all", "fused_add_norm": False},
            {"fp8": "all", "fused_add_norm": False, "fused_residual": False},
        ),
        (
            {"fp8": "none"},
            {
                "fp8": "none",
                "fused_add_norm": False,
                "fused_relu2": False,
                "fused_residual": False,
                "pingpong": False,
            },
        ),
    ],
    ids=str,
)
def test_what_has_no_effect_is_switched_off(changes, expected):
    assert consistent(Recipe(**changes)) == Recipe(**expected)


def test_a_recorded_recipe_reads_back_and_unknown_fields_are_dropped():
    recipe = Recipe(fp8="mlp", recompute=True)
    assert Recipe.from_dict({**recipe.to_dict(), "from_the_future": 1}) == recipe
    assert Recipe.from_dict({}) == recipes.DEFAULT_RECIPE


def test_a_recipe_recorded_before_a_field_was_renamed_is_read():
    record = Recipe(inplace_embedding_grads=False).to_dict()
    record["sparse_tables"] = record.pop("inplace_embedding_grads")
    assert Recipe.from_dict(record) == Recipe(inplace_embedding_grads=False)
