//! What goes wrong is said in one sentence, and the engine goes on.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use pegainfer_core::engine::{RequestId, StepEngine};
use pegainfer_core::exec::Exec;
use pegainfer_qwen35_4b::{LoadOptions, load};
use support::{best, engine, greedy, options, run};

#[test]
fn a_failed_step_fails_its_requests_alone() {
    let mut engine = engine(best(), &options());
    let limits = engine.limits();
    // No vocabulary has this id; `EngineLimits::check` would refuse it.
    engine.add(RequestId(0), greedy(&[1, limits.vocab_size as u32, 2], 4));
    engine.add(RequestId(1), greedy(&[1, 2, 3], 4));
    assert!(engine.plan().is_some());
    let error = engine.launch().unwrap_err();
    assert!(!error.fatal && error.message.contains("vocabulary"), "{error}");
    assert_eq!(engine.abort_all(), [RequestId(0), RequestId(1)]);
    assert!(!engine.has_work());
    assert_eq!(engine.stats().kv_blocks_free, engine.stats().kv_blocks_total);
    assert_eq!(run(&mut engine, &[greedy(&[1, 2, 3], 4)])[0].tokens.len(), 4);
}

#[test]
fn options_that_do_not_fit_are_refused_by_name() {
    for (options, expected) in [
        (LoadOptions { max_model_len: Some(5000), ..options() }, "--max-model-len is 5000"),
        (LoadOptions { max_num_seqs: 0, ..options() }, "--max-num-seqs is 0"),
        (LoadOptions { state_cache_interval: 40, ..options() }, "--state-cache-interval is 40"),
        (LoadOptions { kv_cache_bytes: Some(1), ..options() }, "--kv-cache-memory gives 0"),
        (LoadOptions { model_path: "/nowhere".into(), ..options() }, "cannot read /nowhere/config.json"),
    ] {
        let exec = Exec::cpu(best(), Some(1)).unwrap();
        let error = load(exec, &options, &mut |_, _| {}).unwrap_err().to_string();
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
    }
}
