//! A kernel that becomes slow while the engine runs is named.

use crate::support::{Target, best, cuda_graph, fixture, greedy, options, run};
use pegainfer_core::engine::StepEngine;
use pegainfer_core::ledger::{Cause, Effort, Law, OpLine, OpShares, Selection, StepLog, Watch};
use pegainfer_qwen3_4b::Qwen3;
use pegainfer_runtime::{LoadOptions, load, measure};
use std::time::Duration;

/// Steps of each run.
const TOKENS: usize = 120;
/// Extra time of each call of the slow op.
const SLOW: Duration = Duration::from_millis(4);

/// Ops, one of which runs in decode steps.
const OPS: [&str; 2] = ["linear_swiglu", "decode_layers"];

fn slow_steps(log: &StepLog, cause: Cause) -> u64 {
    log.anomalies().iter().find(|(other, _)| *other == cause).unwrap().1
}

#[test]
fn a_planted_slowdown_is_named() {
    let options =
        LoadOptions { max_model_len: Some(512), max_num_seqs: Some(2), max_num_batched_tokens: Some(64), ..options() };
    let open = |exec| load::<Qwen3>(vec![exec], &options, &mut |_, _| {}).unwrap().engine;
    let graphs = best() == Target::Cuda && cuda_graph();
    let effort = Effort { per_step: Duration::from_millis(20), refine: Duration::ZERO };
    let measured = measure(&mut open(best().exec()), graphs, Selection::Grid(effort), &mut |_| {}).unwrap();
    // The MLP, or the kernel of a GPU that runs whole layers.
    let decode = |line: &&OpLine| line.load.decode_rows == 1 && line.load.prefill_rows == 0;
    let slow = measured.ops.iter().filter(decode).find(|line| OPS.contains(&line.op.as_str())).unwrap();
    let op = OPS.into_iter().find(|op| *op == slow.op).unwrap();
    assert!(slow.calls > 0 && slow.us > 0.0);

    // Graphs are captured when the model is loaded.
    let mut exec = best().exec();
    exec.slow_down(op, Duration::ZERO);
    let mut engine = open(exec);
    let log = engine.step_log().unwrap();
    log.watch(Watch::new(Law::new(&measured.steps, graphs).unwrap(), OpShares::new(&measured.ops)));
    let request = greedy(&fixture().cases[0].prompt_ids, TOKENS);
    run(&mut engine, std::slice::from_ref(&request));
    let steps = log.last(usize::MAX);
    assert!(steps.len() >= TOKENS && steps.iter().all(|step| step.took > Duration::ZERO));
    assert!(steps.iter().all(|step| step.predicted_us.is_some_and(|us| us > 0.0)), "all were measured");
    assert_eq!(slow_steps(&log, Cause::Op), 0, "{:?}", log.last_anomaly());

    engine.executor().exec().slow_down(op, SLOW);
    run(&mut engine, &[request]);
    assert!(slow_steps(&log, Cause::Op) > 0, "{:?}", log.last_anomaly());
    let anomaly = log.last_anomaly().unwrap();
    println!("{anomaly}");
    let (named, us) = anomaly.op.clone().unwrap();
    assert_eq!(named, op, "{anomaly}");
    let planted = slow.calls as f64 * SLOW.as_secs_f64() * 1e6;
    assert!(us > 0.5 * planted && us < 3.0 * planted, "{anomaly}: {us} us, planted {planted}");
}
