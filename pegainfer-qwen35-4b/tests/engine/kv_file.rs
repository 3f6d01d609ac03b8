//! Blocks and states in files outlive the engine.

use crate::support::invariance::Alone;
use crate::support::{Family, best, engine_on, options, rank_counts};
use crate::tiers::prompts;
use pegainfer_core::engine::{RequestId, StepEngine};
use pegainfer_core::kv::tiers::TierStats;
use pegainfer_runtime::{LoadOptions, load};
use pegainfer_testing::TempDir;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Number of prompts, each with 24 full blocks and a state after every eight.
const PROMPTS: usize = 3;
/// Bytes of both files: the prompts need three quarters of the slots for states.
const BYTES: u64 = 40 << 20;
/// Tokens of all prompts up to their last snapshots.
const CACHED: u64 = PROMPTS as u64 * 384;
/// Blocks and states of all prompts.
const BLOCKS: u64 = PROMPTS as u64 * 24;
const STATES: u64 = PROMPTS as u64 * 3;

/// The options without files.
fn plain() -> LoadOptions {
    LoadOptions { state_cache_interval: 128, ..options() }
}

/// The prompts, and what they give without files.
fn alone() -> &'static Alone {
    static ALONE: OnceLock<Alone> = OnceLock::new();
    ALONE.get_or_init(|| with_prompts(1, &plain()))
}

fn with_prompts(ranks: usize, options: &LoadOptions) -> Alone {
    Alone::new(&mut engine_on(ranks, best(), options), best(), prompts()[..PROMPTS].to_vec())
}

/// The files in a directory of their own.
struct Files(TempDir);

impl Files {
    /// No files.
    fn new() -> Self {
        Self(TempDir::new("kv-states"))
    }

    fn blocks(&self) -> PathBuf {
        self.0.path().join("kv")
    }

    fn states(&self) -> PathBuf {
        self.0.path().join("kv.states")
    }

    fn options(&self) -> LoadOptions {
        LoadOptions { kv_offloading_bytes: Some(BYTES), kv_disk: Some((self.blocks(), BYTES)), ..plain() }
    }

    /// Starts an engine and runs the prompts, which the files change in no bit, until nothing is left to be written.
    fn run(&self) -> TierStats {
        Self::run_with(&self.options(), alone())
    }

    fn run_with(options: &LoadOptions, alone: &Alone) -> TierStats {
        Self::run_on(1, options, alone)
    }

    fn run_on(ranks: usize, options: &LoadOptions, alone: &Alone) -> TierStats {
        let mut engine = engine_on(ranks, best(), options);
        alone.holds("a round", &mut engine);
        let stats = engine.stats();
        engine.scheduler().tiers().unwrap().check().unwrap();
        assert_eq!((stats.running, stats.kv_blocks_free), (0, stats.kv_blocks_total));
        stats.tiers
    }
}

/// Changes the bytes of a file.
fn change(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(path).unwrap();
    change(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

/// Changes a bit of each slot, whose payloads are at the end of a file.
fn change_payloads(bytes: &mut [u8], slots: usize, slot_bytes: usize) {
    let first = bytes.len() - slots * slot_bytes.next_multiple_of(4096);
    bytes[first..].iter_mut().step_by(slot_bytes.next_multiple_of(4096)).for_each(|byte| *byte ^= 4);
}

/// Nothing was found in the files.
fn assert_cold(stats: &TierStats) {
    assert_eq!((stats.read_blocks, stats.read_states, stats.hits, stats.loaded_states), (0, 0, 0, 0), "{stats:?}");
}

/// Everything came from the files.
fn assert_warm(stats: &TierStats) {
    assert_eq!((stats.read_states, stats.loaded_states, stats.hits), (3, 3, CACHED), "{stats:?}");
    assert_eq!((stats.read_blocks, stats.corrupt_blocks, stats.failed_transfers), (BLOCKS, 0, 0), "{stats:?}");
}

#[test]
fn states_in_a_file_outlive_the_engine_and_changed_ones_are_computed_again() {
    let files = Files::new();
    let first = files.run();
    assert_cold(&first);
    assert_eq!((first.written_blocks, first.written_states), (BLOCKS, STATES), "{first:?}");
    assert_warm(&files.run());
    change(&files.states(), |bytes| change_payloads(bytes, first.state_disk_slots, first.state_bytes));
    let changed = files.run();
    assert_eq!((changed.corrupt_blocks, changed.loaded_states, changed.hits), (3, 0, CACHED), "{changed:?}");
    // What was computed again was written again.
    assert_eq!(changed.written_states, 3, "{changed:?}");
    assert_warm(&files.run());
}

/// Each rank has its part of a slot. Another number of ranks changes bits, so that it is like another model.
#[test]
fn states_of_several_ranks_outlive_the_engine() {
    for ranks in rank_counts(&[2]) {
        let (files, alone) = (Files::new(), with_prompts(ranks, &plain()));
        assert_cold(&Files::run_on(ranks, &files.options(), &alone));
        assert_warm(&Files::run_on(ranks, &files.options(), &alone));
        assert_cold(&files.run());
    }
}

#[test]
fn a_changed_block_is_computed_again_although_the_state_after_it_is_right() {
    let files = Files::new();
    let first = files.run();
    change(&files.blocks(), |bytes| change_payloads(bytes, first.disk_slots, first.slot_bytes));
    let changed = files.run();
    assert_eq!((changed.corrupt_blocks, changed.loaded_states, changed.hits), (BLOCKS, 0, 0), "{changed:?}");
    assert_warm(&files.run());
}

#[test]
fn a_cleared_cache_is_in_no_file() {
    let files = Files::new();
    let mut engine = engine_on(1, best(), &files.options());
    alone().holds("a round", &mut engine);
    assert!(engine.stats().tiers.state_disk_used > 0);
    engine.reset_prefix_cache();
    while engine.has_work() {
        assert!(engine.plan().is_none(), "only erasures are left");
        engine.wait();
        engine.finish().unwrap();
    }
    let stats = engine.stats().tiers;
    assert_eq!((stats.disk_used, stats.state_disk_used), (0, 0));
    drop(engine);
    assert_cold(&files.run());
}

#[test]
fn files_of_another_model_are_not_used() {
    let files = Files::new();
    files.run();
    // The same sizes, and other weights.
    let other = with_prompts(1, &LoadOptions { dummy_seed: Some(1), ..plain() });
    assert_cold(&Files::run_with(&LoadOptions { dummy_seed: Some(1), ..files.options() }, &other));
}

/// Each file needs the other one: states have the names of blocks, and a prompt is resumed only at a state.
#[test]
fn a_missing_file_is_made_anew_and_the_other_one_is_of_no_use() {
    let files = Files::new();
    files.run();
    std::fs::remove_file(files.blocks()).unwrap();
    let without_blocks = files.run();
    assert_cold(&without_blocks);
    assert_eq!((without_blocks.written_blocks, without_blocks.written_states), (BLOCKS, STATES));
    assert_warm(&files.run());
    std::fs::remove_file(files.states()).unwrap();
    let without_states = files.run();
    assert_cold(&without_states);
    // The blocks are there, and only states are written.
    assert_eq!((without_states.written_blocks, without_states.written_states), (0, STATES));
    assert_warm(&files.run());
}

#[test]
fn states_of_another_file_of_the_same_model_are_not_used() {
    let (files, others) = (Files::new(), Files::new());
    files.run();
    others.run();
    std::fs::copy(others.states(), files.states()).unwrap();
    assert_cold(&files.run());
    assert_warm(&files.run());
}

#[test]
fn a_truncated_file_has_what_is_left_of_it() {
    let files = Files::new();
    let first = files.run();
    // Slots are used from the first one on.
    let left = first.state_disk_used / 2;
    change(&files.states(), |bytes| {
        bytes.truncate(bytes.len() - (first.state_disk_slots - left) * first.state_bytes.next_multiple_of(4096));
    });
    let truncated = files.run();
    assert!(truncated.read_states > 0 && truncated.hits > 0 && truncated.hits < CACHED, "{truncated:?}");
    assert_eq!(truncated.corrupt_blocks, 0, "{truncated:?}");
    assert_warm(&files.run());
    change(&files.states(), |bytes| bytes.truncate(100));
    assert_cold(&files.run());
    assert_warm(&files.run());
}

/// A process that is killed leaves what it has written so far: the files are copied while an engine writes them.
#[test]
fn files_of_a_killed_process_have_whole_blocks_and_states() {
    let (files, killed) = (Files::new(), Files::new());
    let mut engine = engine_on(1, best(), &files.options());
    let mut copies = 0;
    for (id, request) in prompts().into_iter().take(PROMPTS).enumerate() {
        engine.add(RequestId(id as u64), request);
        for _ in 0..4 {
            if engine.plan().is_some() {
                engine.launch().unwrap();
            } else {
                engine.wait();
            }
            engine.finish().unwrap();
        }
        // States first: some of their blocks may be missing, or the other way.
        std::fs::copy(files.states(), killed.states()).unwrap();
        std::fs::copy(files.blocks(), killed.blocks()).unwrap();
        let stats = killed.run();
        assert_eq!((stats.corrupt_blocks, stats.failed_transfers), (0, 0), "{stats:?}");
        copies += stats.read_states;
    }
    assert!(copies > 0, "nothing was written in time");
}

#[test]
fn files_that_cannot_be_used_are_refused_and_stay_as_they_are() {
    let files = Files::new();
    let refusal =
        |options: LoadOptions| load::<Family>(best().execs(1), &options, &mut |_, _| {}).unwrap_err().to_string();
    std::fs::write(files.states(), "a diary").unwrap();
    let foreign = refusal(files.options());
    assert!(foreign.starts_with("--kv-disk: ") && foreign.contains("kv.states holds other data"), "{foreign}");
    assert_eq!(std::fs::read_to_string(files.states()).unwrap(), "a diary");
    std::fs::remove_file(files.states()).unwrap();
    let small = refusal(LoadOptions { kv_disk: Some((files.blocks(), 200_000)), ..files.options() });
    assert!(small.contains("half of the size is for blocks and half for states, and one state takes"), "{small}");
    assert_warm(&{
        files.run();
        files.run()
    });
}
