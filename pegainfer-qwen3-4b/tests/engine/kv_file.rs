//! Blocks in a file outlive the engine.

use crate::support::invariance::Alone;
use crate::support::{Family, best, engine_on, options};
use crate::tiers::prompts;
use pegainfer_core::engine::StepEngine;
use pegainfer_core::kv::tiers::TierStats;
use pegainfer_runtime::{LoadOptions, load};
use pegainfer_testing::TempDir;

/// Bytes of a block of the bundled checkpoint.
const BLOCK: u64 = 16 * 6144;

/// A file in `dir` for 300 blocks, behind host memory for 200.
fn with_file(dir: &TempDir) -> LoadOptions {
    let file = (dir.path().join("kv"), 320 * BLOCK);
    LoadOptions { kv_offloading_bytes: Some(200 * BLOCK), kv_disk: Some(file), ..options() }
}

/// Runs the prompts with these options, which change no bit, until nothing is left to be written.
fn run_all(options: &LoadOptions, alone: &Alone) -> TierStats {
    let mut engine = engine_on(1, best(), options);
    alone.holds("a round", &mut engine);
    let stats = engine.stats();
    engine.scheduler().tiers().unwrap().check().unwrap();
    assert_eq!((stats.running, stats.kv_blocks_free), (0, stats.kv_blocks_total));
    stats.tiers
}

#[test]
fn blocks_in_a_file_outlive_the_engine_and_changed_ones_are_computed_again() {
    let (dir, alone) = (TempDir::new("kv-file"), Alone::new(&mut engine_on(1, best(), &options()), best(), prompts()));
    let options = with_file(&dir);
    let first = run_all(&options, &alone);
    assert!(first.written_blocks >= 6 * 24 && first.read_blocks == 0, "{first:?}");
    let again = run_all(&options, &alone);
    assert!(again.hits == 6 * 384 && again.read_blocks == 6 * 24 && again.corrupt_blocks == 0, "{again:?}");
    // A bit of most blocks.
    let path = dir.path().join("kv");
    let mut bytes = std::fs::read(&path).unwrap();
    let start = bytes.len() / 4;
    bytes[start..].iter_mut().step_by(BLOCK as usize).for_each(|byte| *byte ^= 4);
    std::fs::write(&path, bytes).unwrap();
    let changed = run_all(&options, &alone);
    assert!(changed.corrupt_blocks > 0 && changed.hits < 6 * 384, "{changed:?}");
    // What was computed again was written again.
    let mended = run_all(&options, &alone);
    assert!(mended.hits > changed.hits, "{mended:?}");
}

#[test]
fn a_cleared_cache_is_not_in_the_file() {
    let (dir, alone) = (TempDir::new("kv-file"), Alone::new(&mut engine_on(1, best(), &options()), best(), prompts()));
    let options = with_file(&dir);
    let mut engine = engine_on(1, best(), &options);
    alone.holds("a round", &mut engine);
    engine.reset_prefix_cache();
    while engine.has_work() {
        assert!(engine.plan().is_none(), "only erasures are left");
        engine.wait();
        engine.finish().unwrap();
    }
    assert_eq!(engine.stats().tiers.disk_used, 0);
    drop(engine);
    let again = run_all(&options, &alone);
    assert_eq!((again.read_blocks, again.hits), (0, 0), "{again:?}");
}

#[test]
fn a_file_of_another_model_is_not_used() {
    let dir = TempDir::new("kv-file");
    let alone = Alone::new(&mut engine_on(1, best(), &options()), best(), prompts());
    run_all(&with_file(&dir), &alone);
    // The same sizes, and other weights.
    let dummy = LoadOptions { dummy_seed: Some(1), ..options() };
    let other = Alone::new(&mut engine_on(1, best(), &dummy), best(), prompts());
    let stats = run_all(&LoadOptions { dummy_seed: Some(1), ..with_file(&dir) }, &other);
    assert_eq!((stats.read_blocks, stats.hits), (0, 0), "{stats:?}");
}

#[test]
fn a_file_that_cannot_be_used_is_refused_and_stays_as_it_is() {
    let dir = TempDir::new("kv-file");
    let path = dir.path().join("kv");
    let refusal =
        |options: LoadOptions| load::<Family>(best().execs(1), &options, &mut |_, _| {}).unwrap_err().to_string();
    std::fs::write(&path, "a diary").unwrap();
    let foreign = refusal(with_file(&dir));
    assert!(foreign.starts_with("--kv-disk: ") && foreign.contains("holds other data"), "{foreign}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "a diary");
    std::fs::remove_file(&path).unwrap();
    let held = engine_on(1, best(), &with_file(&dir));
    let locked = refusal(with_file(&dir));
    assert!(locked.contains("another server or model uses"), "{locked}");
    drop(held);
    let alone = refusal(LoadOptions { kv_offloading_bytes: None, ..with_file(&dir) });
    assert!(alone.contains("--kv-disk needs --kv-offloading-size"), "{alone}");
    let nowhere = refusal(LoadOptions { kv_disk: Some(("/nowhere/kv".into(), 1 << 30)), ..with_file(&dir) });
    assert!(nowhere.starts_with("--kv-disk: ") && nowhere.contains("/nowhere/kv"), "{nowhere}");
}
