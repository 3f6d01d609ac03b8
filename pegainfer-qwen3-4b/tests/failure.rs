//! A step that fails: on the CPU its requests fail and the engine goes on; on a GPU a kernel that stops takes the context
//! with it, so no later step can succeed. In a process of its own, because the context is lost for all of it.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use pegainfer_core::engine::{RequestId, StepEngine};
use support::{Target, best, engine, greedy, options, run};

#[test]
fn a_failed_step_is_fatal_where_the_device_is_lost() {
    let mut engine = engine(best(), &options());
    engine.set_depth(2);
    let limits = engine.limits();
    // No vocabulary has this id; `EngineLimits::check` would refuse it.
    engine.add(RequestId(0), greedy(&[1, limits.vocab_size as u32, 2], 4));
    engine.add(RequestId(1), greedy(&[1, 2, 3], 4));
    let error = loop {
        let result = match engine.plan() {
            Some(_) => engine.launch(),
            None => engine.finish().map(drop),
        };
        if let Err(error) = result {
            break error;
        }
    };
    assert_eq!(error.fatal, best() == Target::Cuda, "{error}");
    assert_eq!(engine.abort_all(), [RequestId(0), RequestId(1)]);
    assert!(!engine.has_work());
    assert_eq!(engine.stats().kv_blocks_free, engine.stats().kv_blocks_total);
    if !error.fatal {
        assert_eq!(run(&mut engine, &[greedy(&[1, 2, 3], 4)])[0].tokens.len(), 4);
    }
}
