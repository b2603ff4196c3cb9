"""Write ``reliability.md``: what is promised when something goes wrong, the tests that show it, and what is not.

make map
"""

import inspect
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
PAGE = HERE / "reliability.md"
MARK = "<!-- what follows is written by docs/reliability.py -->\n"


@dataclass(frozen=True)
class Row:
    """A promise.

    Args:
        id: letter of its section, and number.
        promise: what holds; the wording of what is not promised, if ``reason`` is given.
        tests: functions as ``path::name``, or whole files.
        bound: number within which it holds.
        faults: faults of the table that show it.
        reason: why nothing, or not all of it, is promised.
    """

    id: str
    promise: str
    tests: tuple[str, ...] = ()
    bound: str = ""
    faults: tuple[str, ...] = ()
    reason: str = ""


ALL, KILLS = "tests/promises/test_all_or_none.py", "tests/promises/test_kills.py"
FAILURES, LEFT = "tests/promises/test_failures.py", "tests/promises/test_nothing_is_left.py"
HEALTH, FILES = "tests/gradients/test_health.py", "tests/lightning/test_whole_files.py"
RESUME, FRONT_ENDS = "tests/lightning/test_resume.py", "tests/one_process/test_front_ends.py"
TOPK, WIRE = "tests/modes/test_compression.py", "tests/kernels/test_encoders.py"
PID, SAMPLER = "tests/equations/test_pid.py", "tests/data/test_samplers.py"
MEMORY = "tests/modes/test_out_of_memory.py"
SIGNALS, REGISTRATION = "tests/lightning/test_signals.py", "tests/lightning/test_registration.py"

SECTIONS = {"R": "Faults", "M": "Mathematics", "I": "Interfaces", "P": "Costs"}
ROWS = (
    Row(
        "R1",
        "A killed process, rank 0 or another, ends all others with an error. Under torchrun with `--max-restarts`, "
        "workers start again, training goes on from the last checkpoint, and each sample counts once an epoch. Under a "
        "[keeper](lost-workers.md), the others go on with the same total batch and end with the same weights.",
        (
            "tests/lightning/test_members.py::test_the_others_go_on_and_a_newcomer_joins",
            "tests/lightning/test_members.py::test_every_mode_goes_on",
            f"{KILLS}::test_workers_killed_and_started_again",
            f"{KILLS}::test_more_kills_than_restarts_are_an_error",
        ),
        "45 s until all have ended; each restart loses the steps since the last checkpoint; under a keeper, one step "
        "is done again",
        ("Kill",),
        "That survivors keep their processes with NCCL, or outside of Lightning's `hetero_ddp`.",
    ),
    Row(
        "R2",
        "An exception on one rank is that exception there, and an error with the same cause on all others; a "
        "checkpoint of the exception can be saved whichever rank fails.",
        (
            f"{ALL}::test_an_error_of_one_rank_is_the_cause_of_those_of_all_others_wherever_it_comes_from",
            f"{ALL}::test_an_error_on_one_rank_is_saved_without_waiting_for_the_others",
        ),
        "45 s",
        ("Raise",),
    ),
    Row(
        "R3",
        "If all ranks fail, each raises its own error; no process is left behind.",
        (f"{ALL}::test_an_error_on_all_ranks_is_that_error_on_each",),
        "45 s; 10 s more for the last process",
    ),
    Row(
        "R4",
        "A process that is killed between two collectives, in an agreement on a plan, or while it writes a checkpoint "
        "leaves no partial update and no partial file: survivors have equal weights, and the last checkpoint loads.",
        (
            f"{KILLS}::test_workers_killed_and_started_again",
            f"{FILES}::test_a_file_is_whole_at_every_moment",
        ),
        "45 s",
        ("Kill", "KillInAgreement", "LinkCut"),
        "Equal weights of survivors if the process is killed in the middle of a sum, which some may have received.",
    ),
    Row(
        "R5",
        "A machine can leave, come back, or be replaced: torchrun restarts the workers with their new number, and each "
        "sample still counts once an epoch. Under a keeper, a worker that comes back joins the running training, also "
        "if it is lost again.",
        ("tests/lightning/test_members.py", f"{KILLS}::test_a_machine_leaves_and_another_comes", RESUME),
        "one restart for each change",
        reason="Growing pauses between restarts.",
    ),
    Row(
        "R6",
        "Under a keeper, fewer workers than `--min-workers` wait for others, and give up with an error that names the "
        "missing ones.",
        ("tests/promises/test_membership.py::test_fewer_than_the_least_wait_and_then_name_who_is_missing",),
        "10 minutes",
        reason="The same without a keeper: torchrun waits for `min_nodes`, and gives up after its `join_timeout`.",
    ),
    Row(
        "R7",
        "The split moves away from a worker that slows down and back when it recovers, without oscillation; the sum "
        "of the sizes stays the total batch.",
        (
            "tests/equations/test_split_policy.py",
            PID,
            "tests/modes/test_balance.py",
            f"{ALL}::test_plan_moves_away_from_a_slow_loader",
        ),
        "a few changes of the split; no change under noise alone",
    ),
    Row(
        "R8",
        "A rank that stands still for some time changes no weight and loses no sample. The log names it; a process "
        "that stays stopped ends the job, in every front end.",
        (
            f"{FAILURES}::test_a_rank_that_is_stopped_is_named_and_ends_the_others",
            f"{FAILURES}::test_a_rank_that_goes_on_is_said_to_and_nobody_ends",
            f"{FAILURES}::test_an_error_says_who_was_waited_for",
            f"{KILLS}::test_a_process_that_is_stopped_for_ever_is_named_and_ends_the_job_in_every_front_end",
        ),
        "named after half a minute, all ended after a minute, or 3 s after the strategy's `timeout` if that is shorter",
        ("Freeze", "Pause"),
        "An end before the strategy's `timeout` for a rank that is alive but slow: it is only named.",
    ),
    Row(
        "R9",
        "Messages that arrive late, are sent again, or wait for a link that is down for some time change no weight. "
        "The report says that training waits for the link.",
        ("tests/promises/test_link.py::test_rank_0_says_when_the_network_is_thin_and_when_it_stalls",),
        "delays of 5 ms, losses of 200 ms for every tenth message, an outage of 500 ms",
        ("LinkDelay", "LinkDown"),
    ),
    Row(
        "R10",
        'With `on_nonfinite="skip"`, a NaN or infinite gradient on one rank skips the step on all ranks. Residuals, '
        "the noise scale and decisions on the batch stay finite whatever the setting.",
        (
            "tests/modes/test_elastic.py",
            f"{HEALTH}::test_a_skipped_step_leaves_weights_and_momentum_as_they_are",
            f"{HEALTH}::test_stopping_is_an_error_on_all_ranks_that_names_rank_and_batch",
            f"{TOPK}::test_a_gradient_that_is_not_finite_is_left_out_on_all_ranks",
            TOPK,
            "tests/decisions/test_noise_scale.py::test_nan_and_inf_in_one_workers_gradient_leave_the_estimate_finite",
            "tests/decisions/test_adaptive_batch.py::test_nan_and_inf_in_one_workers_gradient_leave_the_decision_alive",
        ),
        "the same step on all ranks",
        ("NaN",),
    ),
    Row(
        "R11",
        "A rank without samples has weight 0 and keeps no other waiting. A `training_step` that returns `None` is an "
        "error on all ranks, as under every distributed strategy of Lightning.",
        ("tests/one_process/test_modules.py::test_weights_equal_one_process", SAMPLER, "tests/test_limits.py"),
        "1e-12",
    ),
    Row(
        "R12",
        "If a batch does not fit in the memory of one rank, in either pass, that rank trains on it in pieces, with the "
        "same gradient. Its bound falls, the plan follows at the same total, and training goes on; if the total no "
        "longer fits, or the batch cannot be cut, all ranks end with an error that says so. `probe_memory` finds each "
        "rank's largest batch before training, and plans keep within it.",
        (
            f"{MEMORY}::test_the_step_has_the_same_gradient_and_the_next_plan_keeps_the_new_bound",
            MEMORY,
            f"{MEMORY}::test_a_total_that_no_longer_fits_is_an_error_on_every_rank",
            f"{MEMORY}::test_what_cannot_be_done_again_is_one_named_error_on_every_rank",
            "tests/lightning/test_memory_probe.py",
            "tests/lightning/test_memory_probe.py::test_every_plan_respects_the_bound_of_every_rank",
        ),
        "1e-14 in double precision; a plan within the bound after three steps, and behind what was drawn",
        ("OutOfMemory",),
        "That training goes on with other strategies than `hetero_ddp`, and in other front ends than Lightning's "
        "Trainer: all ranks end with an error. A test on a GPU, where memory really runs out.",
    ),
    Row(
        "R13",
        "One unit in the last place of one weight is found, with parameter, ranks and batch. Models of other shapes, "
        "or with parameters in another order, are an error on all ranks.",
        (HEALTH, f"{ALL}::test_a_model_of_other_shapes_or_of_another_order_is_an_error_on_all_ranks"),
        "32 parameters at each sync round; single bits between devices of one kind only",
        ("Diverge",),
        "A comparison at the end of training under Fabric and Accelerate, which do not say that it ends.",
    ),
    Row(
        "R14",
        "Ranks that hold different plans, or expect the next sync round at different steps, raise the same error "
        "before the next step.",
        (),
        "the sync round in which it happens",
        ("WrongPlan",),
        "That the plan is sent again: a rank that has lost it is no longer in step.",
    ),
    Row(
        "R15",
        "A compressed message that arrives with impossible indices is refused on all ranks, with rank and bucket. "
        "Nothing of it is applied.",
        (WIRE, "tests/gradients/test_block_topk.py"),
        "the step of the message",
        ("CorruptMessage",),
    ),
    Row(
        "R16",
        "A checkpoint file that is cut off, or in which a byte has changed, is a named error, and so is one in a "
        "folder that Accelerate, Transformers or `hetero_fsdp` saves. Training goes on from the one before if the "
        "damaged one is the `last` file, or a folder that nobody has named. State that is missing or malformed is a "
        "named error, and files of the older kind are read.",
        (
            f"{FILES}::test_a_damaged_file_is_named_or_loads_what_was_saved",
            f"{FILES}::test_a_training_goes_on_from_the_newest_whole_file_where_the_last_is_damaged",
            FILES,
            "tests/front_ends/test_accelerate.py::test_a_state_that_changed_is_named_on_every_rank_or_passed_over",
            "tests/front_ends/test_transformers.py::test_a_checkpoint_that_changed_is_named_on_every_rank_or_passed_over",
            "tests/modes/test_fsdp.py::test_shards_that_changed_are_named_on_every_rank_before_they_are_read",
            "tests/test_hostile_files.py",
            RESUME,
            f"{RESUME}::test_ranks_with_different_checkpoints_are_told",
        ),
        "all 8 bits of every byte of the directory; 1200 random damages",
        ("DamagedCheckpoint",),
        "In place of a damaged folder of shards, no other is taken.",
    ),
    Row(
        "R17",
        "A checkpoint goes on with another number of workers and in plain `ddp`, and one of plain `ddp` here; no "
        "sample is skipped or repeated.",
        (RESUME, FRONT_ENDS),
        "equal to the last bit with the same number of workers",
    ),
    Row(
        "R18",
        "SIGTERM to any rank ends all of them before the same batch, with a checkpoint where one is asked for. "
        "Outside of Lightning, it does so with [the lines that ask for one](faults.md#signals-to-stop).",
        (
            f"{SIGNALS}::test_all_ranks_end_with_a_checkpoint",
            SIGNALS,
            f"{KILLS}::test_a_training_that_is_told_to_end_saves_and_ends",
            "tests/front_ends/test_transformers.py::test_all_ranks_save_after_the_step_that_follows_a_signal",
        ),
        "the second batch after the signal; with Transformers, the step that follows 3 s",
        ("Sigterm",),
        "A checkpoint outside of Lightning without these lines: the process ends at once.",
    ),
    Row(
        "R19",
        "If the record of a run cannot be written, training goes on, with one warning. A full disk raises no other "
        "error of a logger or a checkpoint than under `ddp`, and leaves the older file whole.",
        (
            f"{ALL}::test_full_disk_is_no_worse_than_under_ddp",
            f"{FILES}::test_a_disk_that_is_full_leaves_the_file_that_was_there",
        ),
        "one line",
        ("DiskFull",),
    ),
    Row(
        "R20",
        "Clocks of hosts may differ, and may be set while training runs.",
        (),
        "5 hours",
        ("ClockJump",),
    ),
    Row(
        "M1",
        "For any split, loss reduction, accumulation and clipping, gradients and weights are those of one process on "
        "the whole batch.",
        ("tests/one_process/test_modules.py::test_weights_equal_one_process", FRONT_ENDS),
        "1e-12 in double precision",
    ),
    Row(
        "M2",
        "Block top-k with density 1 is the dense sum, and what is sent and what is left add up to the gradient.",
        (
            f"{TOPK}::test_density_1_is_the_dense_gradient",
            f"{TOPK}::test_applied_and_left_make_up_all_gradients",
            "tests/kernels/test_messages.py::test_what_is_sent_and_what_stays_make_up_what_there_was",
            "tests/kernels/test_encoder_choice.py::test_double_residuals_lose_nothing",
        ),
        "1e-4 in single precision; nothing is lost",
    ),
    Row(
        "M3",
        "The Triton kernels compute what their reference in torch does.",
        ("tests/kernels/test_triton.py",),
        "equal; on CPUs by Triton's interpreter, on GPUs natively",
    ),
    Row(
        "M4",
        "Estimates of the noise scale are unbiased for any split, and the running estimate finds a known one.",
        ("tests/equations/test_noise_scale.py",),
        "5 % after 4000 steps",
        reason="A bound for gradients with heavy tails, whose variance may not exist.",
    ),
    Row(
        "M5",
        "The split is the optimum of the time model, keeps sum and bounds, and gives a faster worker no fewer samples.",
        ("tests/equations/test_optimal_split.py",),
        "never worse than an integer programme",
    ),
    Row(
        "M6",
        "Proportional control settles, does not wind up at a bound, and loses no sample to rounding.",
        (PID, f"{PID}::test_a_worker_held_at_its_minimum_lets_the_others_settle"),
        "three changes",
    ),
    Row(
        "M7",
        "Each sample is drawn by one rank, once an epoch, in an order that seed, epoch and plan determine, also after "
        "a resume in the middle of an epoch.",
        (SAMPLER,),
        "equal sets",
    ),
    Row(
        "M8",
        "Means over an epoch count samples, not ranks.",
        ("tests/one_process/test_modules.py",),
        "the mean over all samples",
        reason="`SyncBatchNorm`: torch has none on CPUs, and its test on GPUs (`tests/gpu`) has not run yet. "
        "Plain batch normalization, which sees each rank's own batch; and values logged with `on_step=True`.",
    ),
    Row(
        "I1",
        "A wrong setting is an error when it is given, on every rank, that says what was given, what is allowed and "
        "what to do.",
        (FRONT_ENDS, "tests/lightning/test_arguments.py", f"{TOPK}::test_wrong_arguments_are_refused_at_construction"),
        "before the first step",
    ),
    Row(
        "I2",
        "Features of Lightning work or are refused with the lines to change: the table in [Limits](limits.md).",
        ("tests/test_limits.py", "tests/test_limits.py::test_what_is_refused_shows_the_lines_to_change"),
        "one case for each row",
    ),
    Row(
        "I3",
        "The package imports without a GPU and without its extras; what needs an extra names the command that installs "
        "it.",
        (REGISTRATION, "tests/front_ends/test_flag.py", "tests/distributions.py"),
        "required packages only",
    ),
    Row(
        "P1",
        "A step takes hardly longer than under `ddp`.",
        ("tests/test_benchmarks.py",),
        "measured: [Benchmarks](benchmarks.md)",
        reason="A number for your machine: two busy cores cannot show 2 %. No test asserts a speed.",
    ),
    Row(
        "P2",
        "Steps leave nothing behind, in any mode: no file, thread, process group, key, hook or tensor. What a training "
        "has set up is gone when the next one of the process begins.",
        (
            f"{LEFT}::test_steps_leave_nothing",
            "tests/promises/test_nothing_is_left.py",
            f"{LEFT}::test_many_trainings_in_one_process_leave_as_much_as_two",
            f"{HEALTH}::test_nothing_is_skipped_any_more_once_the_skipper_has_gone",
            SIGNALS,
        ),
        "10,000 steps, 20 trainings: [Benchmarks](benchmarks.md#long-and-many-trainings)",
        reason="Flat memory of a GPU: its check, a part of `make gpu`, has not run on one yet.",
    ),
)


def cell(text: str) -> str:
    """Return a text as a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell(text) for text in line)} |" for line in lines)


def shown_by(row: Row) -> str:
    """Return the tests of a row: functions with their files, whole files, and faults of the table."""
    named = [test.partition("::") for test in row.tests]
    tests = [f"`{name}` in `{path}`" if name else f"`{path}`" for path, _, name in named]
    faults = (
        [f"{', '.join(f'`{name}`' for name in row.faults)} [in the table](#faults-and-modes)"] if row.faults else []
    )
    return "; ".join([*faults, *tests])


def promised(row: Row) -> str:
    """Return the promise of a row, with what is not promised."""
    if not row.reason:
        return row.promise
    return f"{row.promise} **Not promised:** {row.reason}"


def suite() -> Any:
    """Return the module with the faults, what must hold after each, and the modes."""
    sys.path.insert(0, str(ROOT))
    try:
        from tests.promises import faults
    finally:
        sys.path.remove(str(ROOT))
    return faults


def first_line(documented: Any) -> str:
    """Return the first sentence or line of a docstring."""
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def list_of(names: list[str], everything: list[str]) -> str:
    """Return the names of modes, or those that are missing if these are fewer."""
    missing = [name for name in everything if name not in names]
    if not missing:
        return "all"
    return f"all but {', '.join(missing)}" if len(missing) < len(names) else ", ".join(names)


def faults() -> str:
    """Return the table of faults with their invariants and modes, and which pairs are left out for which reason."""
    pairs = suite()
    modes, rows = list(pairs.MODES), []
    for kind, of_kind in groupby(pairs.FAULTS, key=type):
        variants = list(of_kind)
        run = [mode for mode in modes if any((one, mode) in pairs.PAIRS for one in variants)]
        rows.append((f"`{kind.__name__}`", first_line(kind), first_line(kind.invariant), list_of(run, modes)))
    left = [
        (", ".join(f"`{kind}`" for kind in kinds), list_of(list(of), modes), why) for kinds, of, why in pairs.LEFT_OUT
    ]
    return "\n\n".join(
        (
            "## Faults and modes",
            f"`tests/promises/test_all_or_none.py` puts {len(pairs.FAULTS)} faults into {len(modes)} modes of "
            f"training: {len(pairs.PAIRS)} runs on two ranks (three with a hierarchy), each of which has to end within "
            "45 seconds and to leave no process behind. How often a fault happened is counted in each run.",
            table(("fault", "what happens", "what must hold", "modes"), rows),
            "These pairs are left out:",
            table(("fault", "modes", "reason"), left),
        )
    )


def sections() -> str:
    """Return a section with a table for each kind of promise, and that of the faults."""
    parts = []
    for letter, title in SECTIONS.items():
        rows = [(row.id, promised(row), shown_by(row), row.bound) for row in ROWS if row.id.startswith(letter)]
        parts.append(f"## {title}\n\n" + table(("", "promise", "tests", "bound"), rows))
    return "\n\n".join((*parts, faults())) + "\n"


def page(text: str) -> str:
    """Return the page with the tables of now behind the text that stands before them."""
    return text[: text.index(MARK) + len(MARK)] + "\n" + sections()


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
