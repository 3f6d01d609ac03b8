//! Pages that the KV pool evicted come back from host memory and from a file with the same bits, and so do the slots that
//! a sequence continues from.

use crate::support::invariance::Alone;
use crate::support::{LoadOptions, Target, best, engine, fixture, greedy, options, rank_counts, with_logprobs};
use pegainfer_core::engine::{GenerateRequest, StepEngine};
use pegainfer_core::kv::tiers::TierStats;
use pegainfer_deepseek_v4::numerics::Numerics;
use pegainfer_testing::TempDir;

/// Prompts of three full pages each, of which two fit a pool of eight pages with what they generate.
fn prompts() -> Vec<GenerateRequest> {
    let text = fixture().cases.into_iter().flat_map(|case| case.prompt_ids).collect::<Vec<u32>>();
    (0..5).map(|i| with_logprobs(greedy(&text[i * 31..][..390], 5))).collect()
}

fn plain() -> LoadOptions {
    options(Numerics::REFERENCE)
}

/// A pool of eight pages, and host memory for all that the prompts need.
fn small_pool() -> LoadOptions {
    LoadOptions { kv_cache_bytes: Some(8 * 83_000), kv_offloading_bytes: Some(256 << 20), ..plain() }
}

/// Runs the prompts three times on `ranks` ranks, and returns what the tiers did.
fn again_and_again(ranks: usize, options: &LoadOptions, alone: &Alone) -> TierStats {
    let mut engine = engine(ranks, options);
    for round in 0..3 {
        alone.holds(&format!("{ranks} ranks, round {round}"), &mut engine);
    }
    let stats = engine.stats();
    assert_eq!((stats.running, stats.kv_blocks_free), (0, stats.kv_blocks_total));
    engine.scheduler().tiers().unwrap().check().unwrap();
    assert_eq!((stats.tiers.corrupt_blocks, stats.tiers.failed_transfers), (0, 0), "{:?}", stats.tiers);
    stats.tiers
}

fn assert_loaded(tiers: &TierStats) {
    // A GPU computes prompts of so small a model again where that is faster.
    let expected = if best() == Target::Cuda { 1 } else { 5 } * 384;
    assert!(tiers.hits >= expected && tiers.loaded_states > 0, "{tiers:?}");
}

#[test]
fn evicted_pages_come_back_with_the_same_bits() {
    let alone = Alone::new(&mut engine(1, &plain()), best(), prompts());
    assert_loaded(&again_and_again(1, &small_pool(), &alone));
}

/// Each rank keeps its copy.
#[test]
fn pages_of_several_ranks_come_back_with_the_same_bits() {
    for ranks in rank_counts(&[2]) {
        let alone = Alone::new(&mut engine(ranks, &plain()), best(), prompts());
        assert_loaded(&again_and_again(ranks, &small_pool(), &alone));
    }
}

#[test]
fn files_outlive_the_engine() {
    let dir = TempDir::new("dsv4-tiers");
    let alone = Alone::new(&mut engine(1, &plain()), best(), prompts()[..2].to_vec());
    let options = LoadOptions { kv_disk: Some((dir.path().join("kv"), 256 << 20)), ..small_pool() };
    let mut first = engine(1, &options);
    alone.holds("first", &mut first);
    assert!(first.stats().tiers.written_states > 0, "{:?}", first.stats().tiers);
    drop(first);
    let mut second = engine(1, &options);
    alone.holds("after a start", &mut second);
    let tiers = second.stats().tiers;
    assert!(tiers.read_blocks > 0 && tiers.read_states > 0 && tiers.corrupt_blocks == 0, "{tiers:?}");
}
