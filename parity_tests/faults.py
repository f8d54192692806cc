"""The catalogue of faults: one expression of the source each, what it is changed to, and the test that must fail then.

Every fault is one that the rest of its file tolerates: the program still runs, and computes, accepts or reports something else. Faults of the
kernels stand in test_kernels_faults.py; those planted in running models, whose place the report must name too, in test_models_faults.py,
test_taps.py and test_ports.py.
"""

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("flax_gpt", "torch_ref", "parity_tests", "benchmarks")
VERDICTS = ("assert", "AssertionError", "Failed: DID NOT RAISE")
"""How pytest words the failure of an assertion."""


class Fault(NamedTuple):
    """`right`, which `file` holds exactly once, becomes `wrong`; `test`, a node of pytest in parity_tests, notices."""

    file: str
    right: str
    wrong: str
    test: str


def survives(fault: Fault, folder: Path) -> str:
    """Why the test did not notice the fault, planted in a copy of the packages in `folder`; "" when it failed as it should: by an assertion."""
    source = (ROOT / fault.file).read_text(encoding="utf-8")
    if source.count(fault.right) != 1:
        return f"{fault.file} holds {fault.right!r} {source.count(fault.right)} times: the catalogue has to follow the source"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package)  # compiled files too, which hold for copies with the time of the original
    shutil.copy(ROOT / "pyproject.toml", folder)
    planted = folder / fault.file
    planted.write_text(source.replace(fault.right, fault.wrong), encoding="utf-8")
    for compiled in planted.parent.glob(f"__pycache__/{planted.stem}.*"):
        compiled.unlink()
    verdict = folder / "verdict.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--junitxml={verdict}", f"parity_tests/{fault.test}"]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST"):
        environment.pop(name, None)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return f"{fault.test} passes"
    failures = [one.get("message", "") for one in ElementTree.parse(verdict).iter("failure")] if verdict.exists() else []
    if done.returncode == 1 and failures and all(message.startswith(VERDICTS) for message in failures):
        return ""
    return f"{fault.test} ended with status {done.returncode} and no failed assertion:\n{done.stdout[-3000:]}{done.stderr[-1000:]}"


_MASKS, _TREE, _NAMES, _ROTARY = "flax_gpt/masks.py", "flax_gpt/weights/tree.py", "flax_gpt/weights/torch_names.py", "flax_gpt/weights/rotary.py"
_OPTIMIZER, _STATE = "flax_gpt/training/optimizer.py", "flax_gpt/training/state.py"
_SHARDING = "flax_gpt/training/sharding.py"
_SAMPLING, _DRAWS, _BEAM = "flax_gpt/generation/sampling.py", "flax_gpt/generation/draws.py", "flax_gpt/generation/beam.py"
_LOSS, _DATA, _RANDOM = "flax_gpt/training/loss.py", "flax_gpt/training/data.py", "flax_gpt/random.py"
_TOLERANCES, _JUDGEMENT, _COMPARE = "parity_tests/tolerances.py", "parity_tests/judgement.py", "parity_tests/compare.py"
_MATCHING, _TAPS, _REPORT, _METRICS = "parity_tests/names.py", "parity_tests/taps.py", "parity_tests/report.py", "parity_tests/metrics.py"

FAULTS: dict[str, dict[str, Fault]] = {
    "models": {
        "base of the sinusoids": Fault(
            "flax_gpt/nn/positions.py",
            "/ 10000.0 **",
            "/ 1000.0 **",
            "test_golden.py::test_sinusoidal_positions",
        ),
        "rotation turned back": Fault(
            "flax_gpt/nn/rotary.py",
            "jnp.concatenate([first * cos - second * sin, second * cos + first * sin]",
            "jnp.concatenate([first * cos + second * sin, second * cos - first * sin]",
            "test_architectures.py::test_permuted_projections_turn_one_layout_into_the_other",
        ),
    },
    "masks": {
        "causal without the diagonal": Fault(
            _MASKS, "return keys <= queries", "return keys < queries", "test_masks.py::test_visible_counts_of_the_causal_mask"
        ),
        "window one short on the left": Fault(
            _MASKS, "distance >= -left", "distance > -left", "test_masks.py::test_causal_and_window_follow_their_definitions"
        ),
        "window one short on the right": Fault(
            _MASKS, "distance <= right", "distance < right", "test_masks.py::test_causal_and_window_follow_their_definitions"
        ),
        "offset ignored": Fault(_MASKS, "else queries + offset", "else queries", "test_masks.py::test_causal_and_window_follow_their_definitions"),
        "one padded key seen": Fault(
            _MASKS, "< jnp.asarray(lengths)", "<= jnp.asarray(lengths)", "test_masks.py::test_padding_and_combined_follow_their_definitions"
        ),
        "causal or padding": Fault(
            _MASKS, "[None, None] & padding", "[None, None] | padding", "test_masks.py::test_padding_and_combined_follow_their_definitions"
        ),
        "permutation sees itself": Fault(_MASKS, ":] < rank[...", ":] <= rank[...", "test_masks.py::test_permutation_is_the_originals"),
        "permutation turned round": Fault(_MASKS, ":] < rank[...", ":] > rank[...", "test_masks.py::test_permutation_follows_its_definition"),
        "negative lengths accepted": Fault(
            _MASKS, "(values >= 0) & (values <= limit)", "values <= limit", "test_masks.py::test_lengths_beyond_the_keys_are_refused"
        ),
    },
    "weights": {
        "kernels not transposed": Fault(
            _TREE, '{"kernel": ("weight", True)', '{"kernel": ("weight", False)', "test_weights.py::test_square_kernels_are_transposed_by_kind"
        ),
        "not transposed on the way out": Fault(
            _TREE,
            "np.ascontiguousarray(array.T) if transposed",
            "np.ascontiguousarray(array) if transposed",
            "test_weights.py::test_the_originals_load_unchanged_and_come_back_bitwise",
        ),
        "scale and bias of norms exchanged": Fault(
            _TREE,
            'nnx.LayerNorm: {"scale": ("weight", False), "bias": ("bias", False)}',
            'nnx.LayerNorm: {"scale": ("bias", False), "bias": ("weight", False)}',
            "test_models.py::test_weights_that_came_from_flax",
        ),
        "query and key exchanged": Fault(
            _NAMES,
            '("attention.query", "self_attn.W_Q"),\n        ("attention.key", "self_attn.W_K")',
            '("attention.query", "self_attn.W_K"),\n        ("attention.key", "self_attn.W_Q")',
            "test_golden.py::test_outputs_and_gradients[minigpt]",
        ),
        "an alias that differs accepted": Fault(
            _TREE, "and not _same(arrays[alias], arrays[name])", "and False", "test_weights.py::test_all_errors_come_together_and_nothing_changes"
        ),
        "missing names accepted": Fault(
            _NAMES, "if name not in found and name not in optional", "if False", "test_weights.py::test_all_errors_come_together_and_nothing_changes"
        ),
        "unexpected names accepted": Fault(
            _NAMES, "if name not in wanted]", "if False]", "test_weights.py::test_all_errors_come_together_and_nothing_changes"
        ),
        "shapes compared by rank": Fault(
            _NAMES,
            "found[name] != wanted[name]",
            "len(found[name]) != len(wanted[name])",
            "test_weights.py::test_all_errors_come_together_and_nothing_changes",
        ),
        "layouts of rotary rows exchanged": Fault(
            _ROTARY,
            'if to == "rope_interleaved" else',
            'if to == "rope_half" else',
            "test_architectures.py::test_permuted_projections_turn_one_layout_into_the_other",
        ),
    },
    "optimizers": {
        "warm-up from 0": Fault(
            _OPTIMIZER, "return (count + 1) / warmup", "return count / warmup", "test_training.py::test_schedules_are_torchs_to_the_bit"
        ),
        "cosine one step late": Fault(
            _OPTIMIZER, "progress = (count + 1 - warmup)", "progress = (count - warmup)", "test_training.py::test_schedules_are_torchs_to_the_bit"
        ),
        "cosine down to 0": Fault(
            _OPTIMIZER,
            "config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5",
            "0.5",
            "test_training.py::test_schedules_are_torchs_to_the_bit",
        ),
        "clip without 1e-6": Fault(_OPTIMIZER, "(global_norm(updates) + 1e-6)", "global_norm(updates)", "test_training.py::test_the_clip_is_torchs"),
        "clip as a scale": Fault(_OPTIMIZER, "jnp.minimum(max_norm /", "jnp.maximum(max_norm /", "test_training.py::test_the_clip_is_torchs"),
        "second moment of absolute values": Fault(
            _OPTIMIZER, "(1 - beta2) * g * g", "(1 - beta2) * jnp.abs(g)", "test_optimizer.py::test_steps[adam, no clip-steps2]"
        ),
        "second correction one step late": Fault(
            _OPTIMIZER, "-jnp.expm1(count * log2)", "-jnp.expm1((count + 1) * log2)", "test_optimizer.py::test_steps[adam, no clip-steps2]"
        ),
        "epsilon under the root": Fault(
            _OPTIMIZER,
            "(jnp.sqrt(n / correct2.astype(n.dtype)) + eps)",
            "jnp.sqrt(n / correct2.astype(n.dtype) + eps)",
            "test_optimizer.py::test_steps[adam, no clip-steps2]",
        ),
        "decay on every parameter": Fault(
            _OPTIMIZER, 'decay == "all" or p.ndim >= 2', "True", "test_training.py::test_decay_shrinks_matrices_alone_and_says_which"
        ),
        "Adam with decay": Fault(
            _OPTIMIZER, 'config.optimizer != "adam" and ', "", "test_training.py::test_decay_shrinks_matrices_alone_and_says_which"
        ),
        "SGD: Nesterov turned round": Fault(
            _OPTIMIZER,
            "config.momentum, config.nesterov)",
            "config.momentum, not config.nesterov)",
            "test_optimizer.py::test_steps[sgd, nesterov-steps4]",
        ),
        "SGD: decay after momentum": Fault(
            _OPTIMIZER,
            "[decay, optax.trace(config.momentum, config.nesterov) if config.momentum else optax.identity()]",
            "[optax.trace(config.momentum, config.nesterov) if config.momentum else optax.identity(), decay]",
            "test_optimizer.py::test_steps[sgd, momentum and decay-steps3]",
        ),
        "accumulation: mean of means": Fault(
            _STATE,
            "(counted.astype(x.dtype) / count.astype(x.dtype))",
            "(1 / accumulate)",
            "test_training_parity.py::test_parts_of_a_batch_add_up",
        ),
        "accumulation: one dropout for all parts": Fault(
            _STATE,
            "rows = first_row + jnp.arange(accumulate) * parts",
            "rows = first_row + 0 * jnp.arange(accumulate) * parts",
            "test_training_parity.py::test_parts_of_a_batch_add_up",
        ),
        "devices: one device's gradients alone": Fault(
            _SHARDING,
            "jax.lax.psum(function(own, rows, first_row), DATA)",
            "jax.lax.psum(jax.tree.map(lambda x: x * (first_row == 0), function(own, rows, first_row)), DATA)",
            "test_sharding.py::test_several_devices_are_as_one[float64]",
        ),
        "devices: one dropout for all": Fault(
            _SHARDING, "first_row = jax.lax", "first_row = 0 * jax.lax", "test_sharding.py::test_several_devices_are_as_one[draws]"
        ),
        "devices: steps queue up": Fault(
            _SHARDING,
            "jax.block_until_ready(function(*arguments))",
            "function(*arguments)",
            "test_sharding.py::test_several_devices_are_as_one[draws]",
        ),
        "devices: mean of means": Fault(
            _STATE,
            "accumulated(params, state, rows, count, first_row)",
            "accumulated(params, state, rows, mesh.size * jnp.maximum(jnp.sum(rows.weights), 1), first_row)",
            "test_sharding.py::test_several_devices_are_as_one[float64]",
        ),
        "a bad batch trains": Fault(
            _STATE,
            "good = ~stopped & ~failed(new)",
            "good = ~stopped",
            "test_training.py::test_a_bad_batch_changes_nothing_and_neither_does_what_follows",
        ),
        "the same dropout at every step": Fault(
            _STATE,
            "model.dropout.step[...] = state.step",
            "model.dropout.step[...] = 0 * state.step",
            "test_training.py::test_dropout_draws_anew_at_each_step_and_again_at_the_same",
        ),
    },
    "loss and data": {
        "mean over padding": Fault(
            _LOSS,
            "return jnp.sum(losses * weights.astype(losses.dtype)) / jnp.where(total == 0, 1, total)",
            "return jnp.mean(losses * weights.astype(losses.dtype))",
            "test_training.py::test_padding_counts_for_nothing",
        ),
        "unknown targets cost nothing": Fault(
            _LOSS, "- aim, jnp.nan)", "- aim, 0.0)", "test_training.py::test_labels_outside_the_vocabulary_never_train"
        ),
        "smoothing by the sum": Fault(
            _LOSS,
            "label_smoothing * jnp.mean(logits",
            "label_smoothing * jnp.sum(logits",
            "test_encoder_decoder.py::test_label_smoothing_is_torchs[0.1]",
        ),
        "loss in half precision": Fault(
            _LOSS,
            "jnp.asarray(targets), logits.astype(jnp.promote_types(logits.dtype, jnp.float32))",
            "jnp.asarray(targets), logits",
            "test_training.py::test_the_loss_of_half_precision_logits_is_float32",
        ),
        "targets not shifted": Fault(
            _DATA, "rows[:, 1:].copy()", "rows[:, :-1].copy()", "test_data.py::test_the_original_recipe_has_418_windows_in_27_steps"
        ),
        "padding counted": Fault(_DATA, "weights[: len(starts)] = 1", "weights[:] = 1", "test_data.py::test_an_epoch_holds_every_window_once"),
        "last batch dropped": Fault(
            _DATA, "drop_remainder=False", "drop_remainder=True", "test_data.py::test_the_original_recipe_has_418_windows_in_27_steps"
        ),
        "last window dropped": Fault(
            _DATA,
            "(size - window - 1) // stride + 1",
            "(size - window - 1) // stride",
            "test_data.py::test_the_original_recipe_has_418_windows_in_27_steps",
        ),
        "the beginning held out": Fault(
            _DATA, "return tokens[:cut], tokens[cut:]", "return tokens[-cut:], tokens[:-cut]", "test_data.py::test_the_held_out_part_is_the_end"
        ),
    },
    "generation": {
        "top_k keeps one more": Fault(
            _DRAWS, "< top_k, ranked", "<= top_k, ranked", "test_generation.py::test_filters_keep_the_smallest_set_that_reaches_p"
        ),
        "top_p keeps one more": Fault(
            _DRAWS, "(before < top_p)", "(before <= top_p)", "test_generation.py::test_a_set_that_reaches_p_exactly_is_not_enlarged"
        ),
        "top_p keeps nothing": Fault(
            _DRAWS, "(before < top_p) | first", "before < top_p", "test_generation.py::test_a_set_that_reaches_p_exactly_is_not_enlarged"
        ),
        "equals by the highest id": Fault(
            _DRAWS,
            "order = jnp.argsort(-logits, axis=-1, stable=True)",
            "order = jnp.argsort(logits, axis=-1, stable=True)[..., ::-1]",
            "test_generation.py::test_equal_logits_give_the_lowest_id",
        ),
        "temperature multiplies": Fault(
            _DRAWS,
            "logits / rule.temperature",
            "logits * rule.temperature",
            "test_generation.py::test_both_frameworks_draw_the_same_tokens_with_and_without_cache",
        ),
        "noise of the wrong sign": Fault(
            _DRAWS, "return -jnp.log(-jnp.log1p(", "return jnp.log(-jnp.log1p(", "test_generation.py::test_draws_follow_the_softmax"
        ),
        "the same noise everywhere": Fault(
            _DRAWS,
            "gumbel(random.fold(keys, positions),",
            "gumbel(keys,",
            "test_generation.py::test_both_frameworks_draw_the_same_tokens_with_and_without_cache",
        ),
        "the same noise in all rows": Fault(
            _DRAWS,
            "jnp.arange(rows))",
            "0 * jnp.arange(rows))",
            "test_generation.py::test_both_frameworks_draw_the_same_tokens_with_and_without_cache",
        ),
        "eos ignored": Fault(
            _SAMPLING, "done=s.done | (token == rule.eos)", "done=s.done", "test_generation.py::test_the_loop_ends_when_every_row_has_drawn_eos"
        ),
        "logits of the token before": Fault(
            _SAMPLING,
            "logits[rows, length - start - 1]",
            "logits[rows, length - start - 2]",
            "test_generation.py::test_both_frameworks_draw_the_same_tokens_with_and_without_cache",
        ),
        "cache one slot late": Fault(
            _SAMPLING,
            "s.cache._replace(lengths=last)",
            "s.cache._replace(lengths=last + 1)",
            "test_generation.py::test_both_frameworks_draw_the_same_tokens_with_and_without_cache",
        ),
        "NaN goes on": Fault(
            _SAMPLING,
            "finite=s.finite & jnp.all(jnp.isfinite(logits))",
            "finite=s.finite",
            "test_generation.py::test_logits_that_are_not_finite_end_the_run",
        ),
        "beams: cache not reordered": Fault(
            _BEAM, "jax.tree.map(lambda leaf: leaf[flat], cache)", "cache", "test_beam.py::test_a_narrow_search_equals_the_plain_one"
        ),
        "beams: score multiplied by length": Fault(
            _BEAM, "log_prob / (length.astype", "log_prob * (length.astype", "test_beam.py::test_every_option_equals_the_plain_search"
        ),
        "beams: the finished go on": Fault(
            _BEAM, "jnp.where(ends, -jnp.inf, total), K)", "total, K)", "test_beam.py::test_a_narrow_search_equals_the_plain_one"
        ),
        "beams: the longest lost": Fault(_BEAM, "(ends | (made == rule.until))", "ends", "test_beam.py::test_a_narrow_search_equals_the_plain_one"),
        "beams: last n-gram not seen": Fault(
            _BEAM, "starts + n <= lengths", "starts + n < lengths", "test_beam.py::test_every_option_equals_the_plain_search"
        ),
        "beams: never as False": Fault(
            _BEAM,
            'jnp.where(rule.exponent > 0, rule.until, made) if plan.early_stopping == "never" else made',
            "made",
            "test_beam.py::test_the_compiled_search_stops_where_the_plain_one_does",
        ),
    },
    "random numbers": {
        "another constant": Fault(_RANDOM, "0x7FEB352D", "0x7FEB352B", "test_random.py::test_known_answers"),
        "both words from one hash": Fault(
            _RANDOM, "_hash(k1 ^ _OTHER, k0, word)", "_hash(k0, k1, word)", "test_random.py::test_both_packages_give_the_same_bits"
        ),
        "kept and dropped exchanged": Fault(
            _RANDOM, ">= np.uint32(threshold(rate))", "< np.uint32(threshold(rate))", "test_random.py::test_both_packages_keep_the_same_elements"
        ),
        "threshold cut off": Fault(
            _RANDOM, "min(round(rate * 2**32)", "min(int(rate * 2**32)", "test_random.py::test_thresholds_are_rounded_and_fit_a_word"
        ),
        "first coordinate ignored": Fault(
            _RANDOM, "first[axis] if axis < len(first) else 0", "0", "test_random.py::test_order_and_split_of_a_batch_do_not_matter"
        ),
    },
    "benchmark": {
        "children are strangers": Fault(
            "benchmarks/timing.py", "sum(map(process_seconds, CHILDREN))", "0.0", "test_bench_devices.py::test_the_time_of_children_is_ones_own"
        ),
        "children outlive their worker": Fault(
            "benchmarks/children.py", "os._exit(0)", "return", "test_bench_devices.py::test_no_child_outlives_a_worker_that_was_killed"
        ),
        "processes weighed alike": Fault(
            "benchmarks/torch_worker.py",
            "factor = place.count / int(",
            "factor = 1 / int(",
            "test_bench_devices.py::test_two_devices_of_each_side_compute_what_one_does",
        ),
    },
    "instrument": {
        "infinite limit": Fault(
            _TOLERANCES,
            "    return 1.0 + FACTOR\n",
            '    return float("inf")\n',
            "test_tolerances.py::test_an_error_of_sixteen_bits_leaves_it[product]",
        ),
        "ours held to nothing": Fault(
            _TOLERANCES,
            "return min(max(1.0 + FACTOR * reference, floor), reference_limit())",
            "return reference_limit()",
            "test_tolerances.py::test_ours_is_held_to_the_reference",
        ),
        "a floor for all": Fault(
            _TOLERANCES,
            "return max(1.0, float(np.max(np.mean(relative, axis=0) + spread)))",
            "return reference_limit()",
            "test_tolerances.py::test_a_large_tensor_is_held_to_the_reference_alone",
        ),
        "no floor": Fault(
            _TOLERANCES,
            "return max(1.0, float(np.max(np.mean(relative, axis=0) + spread)))",
            "return 1.0",
            "test_tolerances.py::test_sound_results_beside_an_exact_reference_pass[1]",
        ),
        "ten times the agreement": Fault(
            _TOLERANCES, "AGREEMENT = 1e-9", "AGREEMENT = 1e-8", "test_tolerances.py::test_programs_that_are_one_agree_to_nine_digits"
        ),
        "agreement without limit": Fault(
            _TOLERANCES,
            'return AGREEMENT / UNIT["float64"]',
            'return AGREEMENT / UNIT["float64"] ** 2',
            "test_tolerances.py::test_programs_that_are_one_agree_to_nine_digits",
        ),
        "NaN is no error": Fault(
            _TOLERANCES,
            'if not np.isfinite(error).all():\n            return float("inf")',
            "if not np.isfinite(error).all():\n            return 0.0",
            "test_tolerances.py::test_what_is_not_finite_fails",
        ),
        "what must be exact need not be": Fault(
            _TOLERANCES,
            "np.where(a == 0, 0.0, np.divide",
            "np.where(b == 0, 0.0, np.divide",
            "test_tolerances.py::test_what_must_be_exact_must_be_exact",
        ),
        "small errors are none": Fault(
            _TOLERANCES, "np.abs(error) <= TINY[dtype]", "np.abs(error) <= UNIT[dtype]", "test_tolerances.py::test_what_must_be_exact_must_be_exact"
        ),
        "no worst element": Fault(
            _TOLERANCES, ", np.max(_over(np.abs(error), spread))])", "])", "test_tolerances.py::test_a_single_wrong_element_is_seen"
        ),
        "no disturbance in place": Fault(
            _TOLERANCES,
            'name.rstrip("_") in _EXACT',
            'name.endswith("_") or name in _EXACT',
            "test_tolerances.py::test_the_disturbance_follows_every_way_of_writing_a_result",
        ),
        "rows of what is missing dropped": Fault(
            _JUDGEMENT,
            '            report.rows.append(_empty(name, dtype, "; ".join(notes), truth[name].shape))\n            continue',
            "            continue",
            "test_models_faults.py::test_missing_unexpected_and_misshapen_results_fail",
        ),
        "names of one side alone pass": Fault(
            _JUDGEMENT,
            "            if name not in truth:",
            "            if False:",
            "test_models_faults.py::test_missing_unexpected_and_misshapen_results_fail",
        ),
        "shapes compared by size": Fault(
            _JUDGEMENT,
            "if x.shape != truth[name].shape",
            "if x.size != truth[name].size",
            "test_report.py::test_the_same_numbers_in_another_shape_fail",
        ),
        "infinity need not be expected": Fault(
            _JUDGEMENT, "if allowed and all(", "if all(", "test_report.py::test_what_is_not_finite_must_be_expected_and_the_same"
        ),
        "bits compared by name": Fault(
            _JUDGEMENT,
            "or not np.array_equal(ours[n], theirs[n], equal_nan=True)]",
            "]",
            "test_models_faults.py::test_other_weights_are_refused_before_anything_is_compared",
        ),
        "a comparison of nothing passes": Fault(
            _REPORT, "bool(self.rows) and all(", "all(", "test_models_faults.py::test_an_empty_report_is_no_success"
        ),
        "NaN equals every number": Fault(
            _METRICS,
            "np.isnan(a) & np.isnan(b)",
            "np.isnan(a) | np.isnan(b)",
            "test_report.py::test_a_number_that_is_not_finite_fails_where_it_may_be_but_is_not",
        ),
        "theirs compared with itself": Fault(
            _COMPARE, '{"flax": ours("float64")}', '{"flax": theirs("float64")}', "test_models_faults.py::test_a_fault_fails[one_epsilon]"
        ),
        "a program that changes passes": Fault(
            _COMPARE,
            'exact(report, "torch repeats itself", theirs("float64"), truth)',
            'exact(report, "torch repeats itself", truth, truth)',
            "test_models_faults.py::test_a_reference_that_does_not_repeat_itself_fails",
        ),
        "transposed weights accepted": Fault(
            _MATCHING,
            '("embed", "in_out")):\n        turned = same[::-1]',
            '("embed", "in_out")):\n        turned = same',
            "test_ports.py::test_square_matrices_turn_by_the_kind_of_their_module",
        ),
        "unfilled weights accepted": Fault(
            _MATCHING,
            "if name not in self.found and leaf.trained and not any(",
            "if False and not any(",
            "test_ports.py::test_all_that_is_wrong_with_names_is_told_at_once",
        ),
        "weights left over accepted": Fault(
            _MATCHING,
            "if leaf.trained and self._first(name) not in used and name not in self.aliases",
            "if False",
            "test_ports.py::test_all_that_is_wrong_with_names_is_told_at_once",
        ),
        "unused patterns accepted": Fault(
            _MATCHING,
            "for key in table if key not in used]",
            "for key in () if key not in used]",
            "test_ports.py::test_all_that_is_wrong_with_names_is_told_at_once",
        ),
        "hidden scores compared as numbers": Fault(
            _TAPS, "< UNDERFLOW, -np.inf, scores)", "< UNDERFLOW, scores, scores)", "test_ports.py::test_scores_are_hidden_however_they_are"
        ),
        "the first layout taken": Fault(_TAPS, "options.sort(key=distance)", "pass", "test_ports.py::test_where_two_layouts_fit_our_values_decide"),
        "channels always first": Fault(
            _TAPS, "if len(order) > 1 and reference is not None:", "if False:", "test_ports.py::test_as_many_channels_as_rows_and_columns"
        ),
        "no taps paired": Fault(
            _TAPS,
            "found |= _between(ours, theirs, found)\n    return {name: found[name] for name in ours if name in found}",
            "return {}",
            "test_ports.py::test_a_sound_port_passes_and_its_taps_are_paired",
        ),
    },
}

SAMPLE = ("masks: permutation sees itself", "weights: unexpected names accepted", "generation: top_p keeps nothing")
"""What CI runs: three cheap ones, each of another part."""
