//! Calls that end early, and where calls run.

use crate::support::client::get;
use crate::support::grpc::{Client, join, text};
use crate::support::mock::MockEngine;
use crate::support::{Setup, TestServer, wait_until};
use pegainfer_server::app::Options;
use pegainfer_server::http::{ApiKeys, Secret};
use std::time::{Duration, Instant};
use tonic::Code;
use vllm_proto::finish_info::FinishReason;
use vllm_proto::{AbortRequest, GenerateRequest, KvHintsEnvelope, RandomSampling};

/// A call that runs for a long time.
fn long(name: &str) -> GenerateRequest {
    GenerateRequest { request_id: name.into(), ..text("x", 400) }
}

fn abort(client: &mut Client, name: &str) {
    let call = client.call(AbortRequest { request_ids: vec!["another".into(), name.into()] });
    client.runtime.block_on(client.control.abort(call)).unwrap();
}

#[test]
fn abort_ends_a_stream_with_what_it_has() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(6);
    let server = TestServer::start(engine, Setup::default());
    let [mut client, mut other] = [0; 2].map(|_| Client::connect(server.grpc));
    let sampling = Some(RandomSampling { num_sequences: 2, ..Default::default() });
    let mut stream = client.open(GenerateRequest { sampling, ..long("mine") }).unwrap();
    let mut responses = vec![];
    while responses.len() < 7 {
        responses.push(client.next(&mut stream).unwrap().unwrap());
    }
    abort(&mut other, "yours");
    assert_eq!(server.engine.stats().running, 2);
    abort(&mut other, "mine");
    while let Some(response) = client.next(&mut stream).unwrap() {
        responses.push(response);
    }
    let (_, sequences) = join(&responses);
    for sequence in &sequences {
        let finish = sequence.finish.as_ref().unwrap();
        assert_eq!(finish.finish_reason(), FinishReason::Aborted);
        assert_eq!(finish.num_output_tokens as usize, sequence.ids.len());
    }
    assert_eq!(sequences.iter().map(|sequence| sequence.ids.len()).sum::<usize>(), 6);
    assert_eq!(sequences.len(), 2);
    server.wait_idle();
    assert_eq!(control.cancelled(), 2);
}

#[test]
fn abort_ends_a_whole_answer_with_what_it_has() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(3);
    let server = TestServer::start(engine, Setup::default());
    let grpc = server.grpc;
    let answer = std::thread::spawn(move || Client::connect(grpc).generate(long("mine")).unwrap());
    wait_until("it has its tokens", || control.tokens.load(std::sync::atomic::Ordering::SeqCst) == 3);
    let mut other = Client::connect(server.grpc);
    while !answer.is_finished() {
        abort(&mut other, "mine");
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = answer.join().unwrap().outputs.unwrap();
    assert_eq!(output.finish_info.unwrap().finish_reason(), FinishReason::Aborted);
    assert!(output.text.len() <= " a cat sat".len() && output.num_tokens <= 3, "{}", output.text);
    server.wait_idle();
}

#[test]
fn a_key_aborts_only_its_own_calls() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(1);
    let keys = |names: &[&str]| {
        ApiKeys::load(&names.iter().map(|name| Secret(name.to_string())).collect::<Vec<_>>(), None).unwrap()
    };
    let options = Options { api_keys: keys(&["alpha", "beta"]), admin_keys: keys(&["boss"]), ..Options::default() };
    let server = TestServer::with(engine, options);
    let [mut alpha, mut beta, mut boss] = ["alpha", "beta", "boss"].map(|key| Client::with_key(server.grpc, key));
    let mut stream = alpha.open(long("call")).unwrap();
    alpha.next(&mut stream).unwrap();
    abort(&mut beta, "call");
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(server.engine.stats().running, 1, "it is not beta's");
    abort(&mut boss, "call");
    server.wait_idle();
}

#[test]
fn a_client_that_leaves_cancels_its_calls() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(2);
    let server = TestServer::start(engine, Setup::default());
    let mut client = Client::connect(server.grpc);
    let mut stream = client.open(long("")).unwrap();
    client.next(&mut stream).unwrap();
    drop(stream);
    // The connection runs only while the client's runtime does.
    client.runtime.block_on(async { tokio::time::sleep(Duration::from_millis(100)).await });
    server.wait_idle();
    assert_eq!(control.cancelled(), 1);
    let _streams = [client.open(long("")).unwrap(), client.open(long("")).unwrap()];
    assert_eq!(server.engine.stats().running, 2);
    drop(client);
    server.wait_idle();
    assert_eq!(control.cancelled(), 3);
}

#[test]
fn deadlines_end_calls() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(2);
    let server = TestServer::start(engine, Setup::default());
    let began = Instant::now();
    for (name, value) in [("grpc-timeout", "300m"), ("x-request-timeout", "0.3")] {
        let mut client = Client::connect(server.grpc).with(name, value);
        let error = client.generate(long("")).unwrap_err();
        // The client also knows of its own header, and may be the first to end the call.
        assert!([Code::DeadlineExceeded, Code::Cancelled].contains(&error.code()), "{error}");
        let error = client.stream(long("")).unwrap_err();
        assert!([Code::DeadlineExceeded, Code::Cancelled].contains(&error.code()), "{error}");
        server.wait_idle();
    }
    assert!(began.elapsed() < Duration::from_secs(5));
    let error = Client::connect(server.grpc).with("grpc-timeout", "soon").generate(long("")).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");
}

#[test]
fn a_drain_finishes_what_runs_and_refuses_the_rest() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(2);
    let options = Options { drain_timeout: Duration::from_secs(20), ..Options::default() };
    let mut server = TestServer::with(engine, options);
    let mut client = Client::connect(server.grpc);
    let mut stream = client.open(text("x", 5)).unwrap();
    client.next(&mut stream).unwrap();
    server.stop();
    wait_until("it drains", || get(server.address, "/health").status == 503);
    let error = Client::connect(server.grpc).generate(text("x", 5)).unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    control.allow(usize::MAX);
    let mut tokens = 0;
    while let Some(response) = client.next(&mut stream).unwrap() {
        tokens += response.outputs.unwrap().num_tokens;
    }
    assert_eq!(tokens, 5);
    drop(client);
    server.join();
}

#[test]
fn a_drain_that_takes_too_long_ends_calls() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(2);
    let mut server = TestServer::start(engine, Setup::default());
    let mut client = Client::connect(server.grpc);
    let mut stream = client.open(long("")).unwrap();
    client.next(&mut stream).unwrap();
    server.stop();
    let error = loop {
        match client.next(&mut stream) {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the stream ended without an error"),
            Err(error) => break error,
        }
    };
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    server.join();
}

#[test]
fn metadata_names_the_engine() {
    let (engines, controls): (Vec<_>, Vec<_>) = (0..2).map(|_| MockEngine::replying(" a cat")).unzip();
    let server = TestServer::start_all(engines, Setup::default());
    for _ in 0..3 {
        Client::connect(server.grpc).with("x-data-parallel-rank", "1").generate(text("x", 2)).unwrap();
    }
    assert_eq!([controls[0].added(), controls[1].added()], [0, 3]);
    for bad in ["2", "-1", "x"] {
        let error = Client::connect(server.grpc).with("x-data-parallel-rank", bad).generate(text("x", 2)).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    }
}

#[test]
fn unknown_models_and_adapters_are_not_found() {
    let (server, _) = TestServer::replying(" a cat");
    let mut client = Client::connect(server.grpc);
    client.generate(GenerateRequest { model: "tiny".into(), ..text("x", 2) }).unwrap();
    for (model, lora) in [("huge", ""), ("", "sql"), ("huge", "sql"), ("", "tiny")] {
        let request = GenerateRequest { model: model.into(), lora_name: lora.into(), ..text("x", 2) };
        let error = client.generate(request).unwrap_err();
        assert_eq!(error.code(), Code::NotFound, "{model} {lora}: {error}");
    }
}

#[test]
fn fields_without_effect_are_reported_or_refused() {
    let hints = || GenerateRequest { kv_hints: Some(KvHintsEnvelope::default()), ..text("x", 2) };
    let ignored = |strict| {
        let (engine, _) = MockEngine::replying(" a cat");
        let server = TestServer::with(engine, Options { strict, ..Options::default() });
        let mut client = Client::connect(server.grpc);
        let call = client.call(hints());
        let response = client.runtime.block_on(client.inference.generate(call))?;
        Ok::<_, tonic::Status>(response.metadata().get("x-ignored-fields").unwrap().to_str().unwrap().to_owned())
    };
    assert_eq!(ignored(false).unwrap(), "kv_hints");
    assert_eq!(ignored(true).unwrap_err().code(), Code::InvalidArgument);
}
