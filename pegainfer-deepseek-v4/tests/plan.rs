//! The recorded ops of a step: no weights, no memory.

#![cfg(feature = "deepseek-v4")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use pegainfer_deepseek_v4::config::Config;
use pegainfer_deepseek_v4::numerics::Numerics;
use pegainfer_deepseek_v4::record;
use support::model_path;

#[test]
fn every_layer_is_in_the_plan() {
    let config = Config::load(&model_path()).unwrap();
    let records = record(&config, Numerics::REFERENCE, (2, 1, 300)).unwrap();
    let count = |op: &str| records.iter().filter(|record| record.op == op).count();
    for (op, expected) in [
        ("embed", 1),
        ("hyper_mix", 10),
        ("sparse_attention", 5),
        // Two sparse layers have two compressors each, one heavy layer has one.
        ("compress", 5),
        ("select_entries", 2),
        ("route", 5),
        ("routed_experts", 5),
        ("sample", 1),
    ] {
        assert_eq!(count(op), expected, "{op}");
    }
    // A token reads the experts that it goes to, not all of them.
    let bytes: u64 = records.iter().map(|record| record.bytes).sum();
    assert!((4_000_000..18_000_000).contains(&bytes), "{bytes} bytes");
}
