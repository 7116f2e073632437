"""Real servers, started once a session on free ports and stopped at its end."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from paceline.core.errors import PacelineError
from paceline.wire import ENDED
from support.waiting import DEADLINE_S

if TYPE_CHECKING:  # imported by the fixtures: unit tests need no server
    from paceline_backend.server.embedded import EmbeddedBus
    from paceline_backend.server.stack import Stack
    from support.disks import SmallDisk
    from support.postgres import Postgres

# --hypothesis-profile NAME chooses another than the first. No deadlines: the machine may be busy,
# and the time that an example takes says nothing.
settings.register_profile("paceline", deadline=None, max_examples=30)
settings.register_profile("fast", deadline=None, max_examples=10)
settings.register_profile("long", deadline=None, max_examples=500)
settings.load_profile("paceline")

# torch looks up the name of each store's address, `::ffff:127.0.0.1`, which /etc/hosts hardly ever
# has. Where the name server loses a question, the resolver repeats it after five seconds otherwise.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")
# Sessions without a server train as under DDP, so that tests know their batches. Tests of planning
# on rank 0 choose another policy.
os.environ.setdefault("PACELINE_POLICY", "bsp")

# Jobs in the background of a shell ignore interrupts, and so would the programs that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


# How the names begin of the folders, files, tests and cases that only `make test-all` runs: they
# need an engine, a wheel, an image or the site, draw random input for minutes, inject faults by the
# hundred, take long, or repeat with another script what a quicker test shows.
LONG = (
    "browser/test_accessibility.py",
    "browser/test_long_runs.py",
    "browser/test_operators.py::test_the_second_of_two_switches_is_told_and_keeps_what_it_chose",
    "browser/test_operators.py::test_the_second_to_stop_is_told",
    "browser/test_operators.py::test_two_browsers_with_one_shared_token_know_each_other",
    "browser/test_operators.py::test_who_looks_again_switches_knowingly",
    "browser/test_pages.py::test_a_page_that_could_not_load_goes_on_later[**/*plotly*.js*]",
    "browser/test_pages.py::test_a_run_that_ended_while_the_server_was_away",
    "browser/test_pages.py::test_late_telemetry_of_an_ended_run_is_shown",
    "browser/test_pages.py::test_narrow_and_dark",
    "browser/test_policies.py::test_a_changed_training_wants_a_tick",
    "browser/test_policies.py::test_a_switch_is_reverted",
    "browser/test_policies.py::test_an_effect_stands_beside_its_forecast",
    "browser/test_policies.py::test_auto_is_set_and_tells_what_it_decided",
    "browser/test_policies.py::test_parameters_in_force_are_shown_and_kept",
    "browser/test_policies.py::test_the_buttons_are_always_in_sight",
    "browser/test_policies.py::test_the_dialog_lists_every_preset_with_all_its_parameters",
    "browser/test_policies.py::test_the_keyboard_alone_switches",
    "browser/test_policies.py::test_what_others_would_save_and_switching_to_one",
    "browser/test_policies.py::test_what_the_server_refuses_is_said_at_the_field",
    "browser/test_policies.py::test_why_a_synchroniser_was_chosen_is_told",
    "browser/test_prefix.py",
    "browser/test_real_quality.py",
    "browser/test_rounds.py",
    "browser/test_run.py::test_a_heat_map_of_two_ranks_over_the_whole_run",
    "browser/test_run.py::test_a_run_is_started_stopped_and_goes_on_smaller",
    "browser/test_run.py::test_a_run_without_metrics_shows_none",
    "browser/test_run.py::test_a_viewer_reads_alerts_and_is_offered_no_change",
    "browser/test_run.py::test_an_operator_sets_a_target_and_sees_when_it_was_met",
    "browser/test_run.py::test_both_runs_may_be_chosen_before_the_server_has_answered",
    "browser/test_run.py::test_each_chart_is_a_picture_and_a_table",
    "browser/test_run.py::test_evaluations_that_could_not_load_are_asked_for_again",
    "browser/test_run.py::test_how_long_a_run_took_and_when_it_will_end",
    "browser/test_run.py::test_menus_close_as_menus_do",
    "browser/test_run.py::test_smoothing_and_the_wall_clock",
    "browser/test_run.py::test_the_empty_page_says_what_will_be_there",
    "browser/test_run.py::test_the_heat_map_is_saved_too",
    "browser/test_run.py::test_the_page_of_a_rank_asks_only_when_the_stream_brings_something",
    "browser/test_run.py::test_the_slow_rank_has_colour_until_another_is_pinned",
    "browser/test_run.py::test_two_runs_side_by_side",
    "browser/test_security_headers.py::test_docs_and_login_break_no_policy",
    "browser/test_tabs.py",
    "browser/test_wide_runs.py",
    "chaos/",
    "e2e/test_chain.py",
    "e2e/test_check.py",
    "e2e/test_demo.py::test_port_of_another_server",
    "e2e/test_demo.py::test_signal_leaves_no_process",
    "e2e/test_faults.py",
    "e2e/test_paceline_relaxed.py",
    "e2e/test_relaxed.py",
    "e2e/test_resume.py",
    "e2e/test_shapes.py",
    "e2e/test_streams.py",
    "e2e/test_tensor_parallel.py",
    "e2e/test_token_budget.py",
    "engines/",
    "integration/api/test_compare.py::test_what_sides_cost",
    "integration/api/test_fuzz.py",
    "integration/api/test_history.py::test_an_export_never_holds_more_than_some_parts",
    "integration/api/test_limits.py::test_a_body_with_many_mistakes_gets_a_short_answer",
    "integration/api/test_limits.py::test_a_lone_surrogate_is_refused",
    "integration/api/test_matrix.py",
    "integration/api/test_schemathesis.py",
    "integration/api/test_streams.py::test_many_streams_share_few_connections",
    "integration/backends/test_kubernetes_container.py",
    "integration/control/test_advisor.py::test_it_switches_a_run_that_allows_it",
    "integration/control/test_backlog.py",
    "integration/control/test_ingest.py::test_a_bus_that_goes_away_makes_no_entry_suspicious",
    "integration/control/test_ingest.py::test_killed_again_and_again_while_producing",
    "integration/control/test_ingest_fuzz.py",
    "integration/control/test_leases.py::test_processes_that_contend_share_the_runs_out",
    "integration/frameworks/test_observed.py",
    "integration/frameworks/test_planned.py",
    "integration/frameworks/test_torchtitan.py::test_the_example_runs_alone",
    "integration/insight/test_auto.py::test_slow_first_steps_do_not_change_the_training",
    "integration/insight/test_auto.py::test_what_changes_the_training_is_left_once_it_saves_nothing",
    "integration/insight/test_forecast_misses.py",
    "integration/insight/test_replay.py::test_the_choice_of_a_synchroniser_comes_out_the_same",
    "integration/insight/test_scripted_scenarios.py",
    "integration/insight/test_whatif.py::test_a_forecast_of_some_presets_answers_nobody_who_asks_for_all",
    "integration/insight/test_whatif.py::test_a_variant_that_is_in_force_is_not_forecast_again",
    "integration/insight/test_whatif.py::test_noise_makes_no_saving",
    "integration/insight/test_whatif.py::test_over_rest",
    "integration/insight/test_whatif.py::test_the_best_variant_of_a_preset_stands_beside_its_defaults",
    "integration/insight/test_whatif.py::test_warnings_before_a_switch",
    "integration/insight/test_whatif_relaxed.py::test_auto_chooses_them_only_where_it_may",
    "integration/insight/test_whatif_relaxed.py::test_it_is_what_each_preset_takes",
    "integration/insight/test_whatif_relaxed.py::test_the_database_tells_what_memory_does",
    "integration/node/test_adopted.py",
    "integration/node/test_agent.py::test_a_run_ends_on_a_full_disk_as_it_ended",
    "integration/node/test_agent.py::test_a_run_goes_on_with_further_attempts",
    "integration/node/test_agent.py::test_bad_input_harms_nobody_else",
    "integration/node/test_agent.py::test_leaves_in_order_when_the_provider_takes_the_machine_back",
    "integration/node/test_agent.py::test_runs_side_by_side_one_killed",
    "integration/node/test_launcher.py::test_a_driver_is_started_once_and_is_no_rank",
    "integration/node/test_launcher.py::test_first_to_raise_is_to_blame_even_if_last_to_exit",
    "integration/node/test_launcher.py::test_killed_rank_is_named_and_ends_the_others",
    "integration/node/test_launcher.py::test_rank_that_raises_is_named_and_ends_the_others",
    "integration/node/test_launcher.py::test_ranks_reduce_and_finish",
    "integration/node/test_several.py",
    "integration/requests/test_resume.py::test_a_run_that_was_stopped_gently_has_finished_and_goes_on",
    "integration/requests/test_several_nodes.py::test_a_node_leaves",
    "integration/server/test_private.py",
    "integration/server/test_server.py::test_an_orphaned_bus_is_taken_over",
    "integration/server/test_server.py::test_bus_port_taken_by_another_program",
    "integration/server/test_server.py::test_killed_and_started_again",
    "integration/server/test_tls.py::test_a_run_over_tls",
    "integration/server/test_trust_network.py::test_a_node_reaches_the_bus_where_it_has_found_the_server",
    "integration/server/test_trust_network.py::test_with_the_flag_and_on_loopback_the_bus_stays_there",
    "integration/server/test_trust_network.py::test_without_the_flag_the_bus_stays_on_loopback",
    "integration/simulator/test_large_worlds.py",
    "integration/store/test_history.py::test_a_filter_answers_the_runs_that_plain_python_answers",
    "integration/strangers/test_checks.py::test_nodes_taken_by_number",
    "integration/strangers/test_doctor_faults.py",
    "integration/strangers/test_hangs.py",
    "integration/strangers/test_odd_scripts.py::test_gradients_are_those_of_one_process[compile",
    "integration/strangers/test_server.py",
    "integration/test_benchmarks.py",
    "integration/test_cli.py::test_operator_stops_a_foreground_run",
    "integration/test_cli.py::test_run_that_ends_while_the_bus_is_away_is_delivered_by_an_agent",
    "integration/test_cli.py::test_run_without_a_server",
    "integration/test_cli.py::test_signal_ends_a_run[2]",
    "integration/test_cli.py::test_what_nobody_asked_for_does_not_hinder_training",
    "integration/test_cli.py::test_what_only_some_plans_and_pages_need_is_not_imported_at_the_start",
    "integration/test_cli_fuzz.py",
    "integration/test_cli_logs.py::test_a_run_in_the_foreground_beside_an_agent",
    "integration/test_cli_logs.py::test_ranks_of_a_real_run",
    "integration/test_docker.py",
    "integration/test_doctor.py::test_a_framework_without_its_adapter",
    "integration/test_doctor.py::test_a_script_that_saves_by_itself",
    "integration/test_doctor.py::test_a_script_without_a_fault",
    "integration/test_doctor.py::test_a_sharded_model_is_called_on_no_rank_alone",
    "integration/test_doctor.py::test_a_stream_is_examined_as_far_as_it_has_no_index",
    "integration/test_doctor.py::test_plain_ddp_is_told_what_to_write",
    "integration/test_doctor.py::test_random_numbers_by_sample_depend_on_no_rank",
    "integration/test_doctor.py::test_random_numbers_of_a_batch",
    "integration/test_doctor.py::test_the_examples_are_right",
    "integration/test_doctor.py::test_the_scripts_folder_comes_first_and_not_the_doctors",
    "integration/test_doctor.py::test_what_is_to_be_known_is_no_problem",
    "integration/test_doctor_corpus.py",
    "integration/test_example_policy.py",
    "integration/test_example_policy.py::test_the_server_offers_it",
    "integration/test_kernels.py::test_kernels_in_a_folder_that_can_only_be_read",
    "integration/test_release.py",
    "integration/test_setup.py",
    "integration/test_site.py",
    "integration/test_speech_example.py",
    "integration/test_terminal.py::test_run_without_a_terminal_says_it_in_plain_lines",
    "integration/test_vision_example.py",
    "integration/test_wheel.py",
    "integration/train/test_ddp.py::test_a_compiled_wrapped_model_has_the_gradient",
    "integration/train/test_fsdp.py::test_accumulated_gradient_is_that_of_one_process",
    "integration/train/test_gpu.py::test_on_the_cpu",
    "integration/train/test_gpu.py::test_without_a_gpu_the_program_says_so",
    "integration/train/test_startup.py::test_nodes_with_the_same_host_name_meet",
    "integration/train/test_startup.py::test_ranks_of_one_network_namespace_are_at_the_same_place",
    "integration/train/test_memory.py",
    "integration/train/test_rounds.py::test_a_rank_that_is_not_drawn_does_not_call",
    "integration/train/test_seeding.py::test_a_sample_draws_the_same_numbers_wherever_it_is_loaded",
    "integration/train/test_seeding.py::test_workers_that_live_for_several_epochs[spawn]",
    "integration/train/test_stream_sources.py::test_a_shard_that_cannot_be_read_is_named",
    "integration/train/test_stream_sources.py::test_a_shuffle_of_hugging_face_without_a_seed_is_refused",
    "integration/train/test_streams.py::test_processes_that_wait_for_a_piece_end_with_their_rank",
    "integration/train/test_survival.py",
    "integration/train/test_synchronisers.py::test_a_closed_session_leaves_no_threads",
    "integration/train/test_synchronisers.py::test_a_rank_that_is_killed_ends_the_others",
    "integration/train/test_synchronisers.py::test_a_rank_that_is_late_once_changes_nothing_else",
    "integration/train/test_synchronisers.py::test_a_rank_that_leaves_alone_is_named[hierarchical",
    "integration/train/test_synchronisers.py::test_a_rank_that_leaves_alone_is_named[local",
    "integration/train/test_synchronisers.py::test_a_rank_that_leaves_alone_is_named[rna-raise",
    "integration/train/test_synchronisers.py::test_a_rank_that_raises_before_a_collective_ends_all",
    "integration/train/test_synchronisers.py::test_all_leave_by_an_exception",
    "integration/train/test_synchronisers.py::test_all_leave_early",
    "integration/train/test_synchronisers.py::test_gradients_are_reduced_again_where_the_next",
    "integration/train/test_synchronisers.py::test_ranks_that_share_batches_leave_no_loop_early",
    "integration/train/test_synchronisers.py::test_replicas_are_the_same_in_the_end[local-a",
    "integration/train/test_synchronisers.py::test_replicas_are_the_same_in_the_end[local-s",
    "integration/train/test_synchronisers.py::test_replicas_are_the_same_in_the_end[local-w",
    "integration/train/test_synchronisers.py::test_replicas_are_the_same_in_the_end[pairwise-w",
    "integration/train/test_synchronisers.py::test_scripts_that_keep_the_all_reduce",
    "integration/train/test_tensor_parallel.py::test_presets_are_switched_between",
    "security/test_intruders.py::test_a_flood_is_bounded",
    "security/test_intruders.py::test_a_plan_with_the_right_mac_would_be",
    "security/test_intruders.py::test_nobody_runs_programs_as_the_agents_user",
    "security/test_intruders.py::test_stores_of_runs_are_closed",
    "security/test_poison.py",
    "unit/insight/test_fitness.py::test_any_preset_under_any_conditions",
    "unit/insight/test_shapes.py::test_other_models_say_the_same_of_the_measured_steps",
    "unit/policies/test_token_budget.py::test_every_rank_works_in_long_steps_where",
)

# Tests with many cases, and how many of them `make test` runs, at equal distances from the first
# one: the others take long and differ in one value.
SAMPLED = {
    "integration/strangers/test_odd_scripts.py": {
        "test_gradients_are_those_of_one_process": 24,
    },
    "integration/train/test_fsdp.py": {
        "test_checkpoints_hold_a_sharded_model_and_its_optimiser": 1,
        "test_in_half_precision_the_gradient_is_that_of_one_process_but_for_rounding": 2,
        "test_under_a_relaxed_policy_gradients_stay_reduced": 1,
    },
    "integration/train/test_lost_ranks.py": {
        "test_a_rank_out_of_step_is_named_on_all": 4,
    },
    "integration/train/test_peers.py": {
        "test_a_mean_on_its_way_comes_into_force_some_steps_later": 6,
        "test_each_step_of_each_rank_counts_once": 7,
    },
    "integration/train/test_rounds.py": {
        "test_a_rank_that_leaves_is_named": 2,
        "test_every_gradient_counts_once_or_as_dropped": 7,
        "test_rounds_of_few_take_a_share_of_a_step": 1,
    },
    "integration/train/test_session.py": {
        "test_a_model_that_was_not_wrapped_is_refused_in_the_first_step": 1,
        "test_accumulation_is_that_of_one_process": 2,
    },
    "integration/train/test_synchronisers.py": {
        "test_a_round_of_all_is_an_all_reduce": 2,
        "test_each_gradient_is_applied_once": 4,
        "test_replicas_are_the_same_in_the_end": 8,
    },
    "security/test_roles.py": {
        "test_a_cookie_cannot_be_made": 2,
    },
    "unit/insight/test_replay.py": {
        "test_replay_makes_each_plan_again": 4,
    },
    "unit/policies/presets/test_harmless.py": {
        "test_no_harm_on_equal_ranks": 2,
        "test_no_harm_whatever_samples_cost": 2,
        "test_uneven_ranks_gain_as_much_as_by_measured_times": 1,
    },
    "unit/train/test_discovery.py": {
        "test_an_exception_that_ends_a_loop_is_seen": 8,
    },
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Takes turns between folders, so that browsers or trainings do not all run at the same time.

    Within a folder, files with many tests come first. The unit tests' short files come last, when
    workers end at different times.

    Other tests than those wait for processes, with deadlines of their own: they may take longer.
    """
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder != "unit" and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_LONGEST_S))
        if item.nodeid.removeprefix("tests/").startswith(LONG) or _repeats_on_postgres(item):
            item.add_marker(pytest.mark.long)
    _sample(items)
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    by_folder: dict[str, list[Path]] = {}
    for path in sorted(files, key=lambda path: -len(files[path])):
        folder = path.relative_to(Path(__file__).parent).parts[0]
        by_folder.setdefault(folder, []).append(path)
    turns = {
        path: (folder == "unit", (place + 0.5) / len(paths))
        for folder, paths in by_folder.items()
        for place, path in enumerate(paths)
    }
    items.sort(key=lambda item: turns[item.path])


def pytest_collection_finish() -> None:
    """Tests and modules stay: no search for garbage needs to look at them again."""
    gc.collect()
    gc.freeze()


def _sample(items: list[pytest.Item]) -> None:
    """Mark as long the cases that SAMPLED leaves out."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("long") is None:
            cases.setdefault(item.nodeid.removeprefix("tests/").partition("[")[0], []).append(item)
    for file, tests in SAMPLED.items():
        for test, number in tests.items():
            of = cases.get(f"{file}::{test}", [])
            chosen = {len(of) * place // number for place in range(number)}
            for place, item in enumerate(of):
                if place not in chosen:
                    item.add_marker(pytest.mark.long)


def _repeats_on_postgres(item: pytest.Item) -> bool:
    """Whether a test of something other than the store repeats on Postgres what SQLite shows."""
    of = getattr(item, "callspec", None)
    if of is None or item.path.is_relative_to(_STORE):
        return False
    return "postgres" in (of.params.get("database_url"), of.params.get("empty_database_url"))


_DATABASES = ("sqlite", "postgres")
_STORE = Path(__file__).parent / "integration" / "store"
_LONGEST_S = 600  # of a test that waits for processes: above the deadlines in support/waiting.py


@pytest.fixture(scope="session", autouse=True)
def _state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers of tests keep their tokens apart from the user's, for processes of tests, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _patient() -> Iterator[None]:
    """Servers of a busy machine may take longer to start, and to answer."""
    from paceline.node import client

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "CALL_TIMEOUT_S", DEADLINE_S)
        patch.setattr("paceline_backend.server.stack._READY_S", DEADLINE_S)
        yield


@pytest.fixture(scope="session")
def _bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBus]:
    from paceline_backend.server.embedded import EmbeddedBus

    with EmbeddedBus(tmp_path_factory.mktemp("bus")) as bus:
        yield bus


@pytest.fixture
def bus_url(_bus: EmbeddedBus) -> str:
    """A running, empty Redis-protocol server."""
    import redis

    with redis.Redis.from_url(_bus.url) as client:
        client.flushall()
    return _bus.url


@pytest.fixture(scope="session")
def _postgres() -> Iterator[Postgres]:
    from support.postgres import Postgres

    server = Postgres().start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def _sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without rows, to copy."""
    from paceline_backend.store import Store

    path = tmp_path_factory.mktemp("sqlite") / "paceline.db"
    Store.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture(params=_DATABASES)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh database without rows, of both kinds; outside of `store/`, `make test` has SQLite."""
    if request.param == "sqlite":
        copy = shutil.copy(request.getfixturevalue("_sqlite"), tmp_path / "paceline.db")
        return f"sqlite:///{copy}"
    server: Postgres = request.getfixturevalue("_postgres")
    return server.database(tables=True)


@pytest.fixture(params=_DATABASES)
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh database without tables, of both kinds."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'paceline.db'}"
    server: Postgres = request.getfixturevalue("_postgres")
    return server.database()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A file system of 2 MB, which a test can fill."""
    from support.disks import SmallDisk

    with SmallDisk(tmp_path / "disk", 2 << 20) as disk:
        yield disk


@pytest.fixture(scope="session")
def _shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    from paceline_backend.server.stack import Stack

    with Stack(tmp_path_factory.mktemp("shared") / "data", 0) as running:
        yield running


@pytest.fixture
def shared_stack(_shared_stack: Stack) -> Iterator[Stack]:
    """As `stack`, but of several tests: for those that ask about their own runs alone."""
    yield _shared_stack
    for run in _shared_stack.api("GET", "/runs?limit=20")["items"]:
        if run["state"] not in ENDED:  # its test failed
            with contextlib.suppress(PacelineError):
                _shared_stack.api("POST", f"/runs/{run['id']}/stop", {"force": True})


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """A running embedded stack: server, bus, SQLite and one agent."""
    from paceline_backend.server.stack import Stack

    with Stack(tmp_path / "data", 0) as running:
        yield running
