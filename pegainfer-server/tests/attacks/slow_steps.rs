//! A kernel that becomes slow while the engine runs is named in a trace file. Also tests the newest steps over HTTP.

use crate::support::client::{get, post_with};
use crate::support::mock::MockEngine;
use crate::support::{Setup, TestServer, alone};
use pegainfer_core::engine::{GenerateRequest, RequestId, StepEngine};
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::ledger::{Effort, Law, OpLine, OpShares, Selection, Watch};
use pegainfer_kernels::cuda;
use pegainfer_qwen3_4b::Qwen3;
use pegainfer_runtime::{LoadOptions, ModelEngine, Overrides, load, measure};
use pegainfer_server::app::Options;
use pegainfer_server::trace::steps;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// Additional time of each call of the slow op.
const SLOW: Duration = Duration::from_millis(4);
/// Candidate ops, one of which decodes.
const OPS: [&str; 2] = ["linear_swiglu", "decode_layers"];

fn exec() -> Exec {
    cuda::open(0, None).unwrap_or_else(|_| Exec::cpu(Isa::best(), Some(1)).unwrap())
}

fn engine(exec: Exec) -> ModelEngine<Qwen3> {
    let options = LoadOptions {
        model: (),
        model_path: Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/qwen3-tiny"),
        overrides: Overrides::default(),
        dummy_seed: None,
        max_model_len: Some(512),
        max_num_seqs: Some(2),
        max_num_batched_tokens: Some(64),
        max_num_mixed_tokens: 64,
        cuda_graph: false,
        lora: None,
        speculation: None,
        kv_cache_bytes: Some(16 << 20),
        gpu_memory_utilization: 0.9,
        gpu_memory_limit: None,
        loop_back_ranks: None,
        check_ranks: false,
        state_cache_bytes: None,
        state_cache_interval: 64,
        kv_offloading_bytes: None,
        kv_disk: None,
    };
    load::<Qwen3>(vec![exec], &options, &mut |_, _| {}).unwrap().engine
}

fn generate(engine: &mut ModelEngine<Qwen3>, id: u64, tokens: usize) {
    let label = Some(format!("request-{id}").into());
    let request = GenerateRequest { ignore_eos: true, label, ..GenerateRequest::greedy(vec![5, 6, 7], tokens) };
    engine.add(RequestId(id), request);
    while engine.has_work() {
        match engine.plan() {
            Some(_) => engine.launch().unwrap(),
            None => {
                engine.wait();
                engine.finish().unwrap();
            }
        }
    }
}

/// The trace of the slow step with this cause.
fn trace(dir: &Path, cause: &str) -> Option<Value> {
    let files = dir.read_dir().unwrap().map(|file| std::fs::read(file.unwrap().path()).unwrap());
    // A file that is being written is incomplete.
    let mut traces = files.filter_map(|file| serde_json::from_slice::<Value>(&file).ok());
    traces.find(|trace| trace["otherData"]["cause"] == cause)
}

#[test]
fn the_trace_of_a_slow_step_names_the_slow_op() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let effort = Effort { per_step: Duration::from_millis(20), refine: Duration::ZERO };
    let measured = measure(&mut engine(exec()), false, Selection::Grid(effort), &mut |_| {}).unwrap();
    let decode = |line: &&OpLine| line.load.decode_rows == 1 && line.load.prefill_rows == 0;
    let slow = measured.ops.iter().filter(decode).find(|line| OPS.contains(&line.op.as_str())).unwrap();
    let op = OPS.into_iter().find(|op| *op == slow.op).unwrap();

    let mut engine = engine(exec());
    let log = engine.step_log().unwrap();
    log.watch(Watch::new(Law::new(&measured.steps, false).unwrap(), OpShares::new(&measured.ops)));
    steps::write_captures(&log, None, dir.path()).unwrap();
    generate(&mut engine, 1, 120);
    assert!(trace(dir.path(), "op").is_none(), "{:?}", log.last_anomaly());
    engine.executor().exec().slow_down(op, SLOW);
    generate(&mut engine, 2, 60);

    let began = Instant::now();
    let trace = loop {
        match trace(dir.path(), "op") {
            Some(trace) => break trace,
            None if began.elapsed() > Duration::from_secs(20) => panic!("no trace; {:?}", log.last_anomaly()),
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let found = &trace["otherData"];
    assert_eq!(found["op"]["name"], op, "{found}");
    let planted = slow.calls as f64 * SLOW.as_secs_f64() * 1e6;
    let excess = found["op"]["excess_us"].as_f64().unwrap();
    assert!(excess > 0.5 * planted && excess < 3.0 * planted, "{found}, planted {planted}");
    let events = trace["traceEvents"].as_array().unwrap();
    let calls = |name: &str| -> Vec<f64> {
        let of = events.iter().filter(|event| event["name"] == name && event["ph"] == "X");
        of.map(|event| event["dur"].as_f64().unwrap()).collect()
    };
    assert!(calls("decode").len() > 60, "the steps before and after the slow one");
    let slow_calls = calls(op).into_iter().filter(|us| *us >= SLOW.as_secs_f64() * 1e6).count();
    assert!(slow_calls >= 8 * slow.calls, "{slow_calls} slow calls, {} in a step", slow.calls);
    let requests = events.iter().filter(|event| event["name"] == "requests");
    let first_row = |event: &Value| event["args"]["[request, x-request-id, tokens, context]"][0].clone();
    let slow_request = requests.map(first_row).find(|row| row[0] == 2);
    assert_eq!(slow_request.unwrap()[1], "request-2", "{found}");
}

#[test]
fn the_engine_knows_each_choice_by_the_id_of_its_request() {
    let (engine, control) = MockEngine::replying(" a cat");
    let server = TestServer::start(engine, Setup::default());
    let labels = |body: Value| -> Vec<String> {
        control.added.lock().unwrap().clear();
        assert_eq!(post_with(server.address, "/v1/completions", ("x-request-id", "req-7"), &body).status, 200);
        let added = control.added.lock().unwrap();
        added.iter().map(|request| request.label.as_deref().unwrap().to_owned()).collect()
    };
    assert_eq!(labels(json!({"prompt": "on"})), ["req-7"]);
    assert_eq!(labels(json!({"prompt": ["on", "the"], "n": 2})), ["req-7#0", "req-7#1", "req-7#2", "req-7#3"]);
    assert_eq!(labels(json!({"prompt": "on", "request_id": "mine"})), ["req-7"], "the log has the header");
}

#[test]
fn the_newest_steps_are_lines_a_trace_or_times_of_ops() {
    let options = Options { admin_local: true, ..Options::default() };
    let server = TestServer::with(MockEngine::replying(" a cat").0, options);
    let lines = get(server.address, "/debug/steps?last=2").text();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), [3, 4]);
    let trace = get(server.address, "/debug/steps?format=perfetto&last=3").json();
    let steps = trace.as_array().unwrap().iter().filter(|event| event["ph"] == "X" && event["tid"] == 1);
    assert_eq!(steps.map(|event| event["dur"].as_f64().unwrap()).collect::<Vec<_>>(), [2000.0; 3]);
    assert!(get(server.address, "/debug/steps?format=ops").json().is_object());
    for wrong in ["last=x", "format=svg", "first=1"] {
        assert_eq!(get(server.address, &format!("/debug/steps?{wrong}")).status, 400, "{wrong}");
    }
}
