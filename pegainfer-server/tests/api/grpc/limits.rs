//! Keys, budgets and hostile clients.

use crate::support::client::get;
use crate::support::grpc::{Client, text};
use crate::support::mock::MockEngine;
use crate::support::{Setup, TestServer, wait_until};
use pegainfer_server::app::Options;
use pegainfer_server::http::{ApiKeys, Secret};
use pegainfer_server::limits::Limits;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};
use tonic::Code;
use vllm_proto::generate_request::Prompt;
use vllm_proto::{GenerateRequest, GetServerInfoRequest, ListLorasRequest, MediaItem, ShutdownRequest, SleepRequest};

fn keys(names: &[&str]) -> ApiKeys {
    ApiKeys::load(&names.iter().map(|name| Secret(name.to_string())).collect::<Vec<_>>(), None).unwrap()
}

#[test]
fn keys_are_those_of_http() {
    let (engine, _) = MockEngine::replying(" a cat");
    let options = Options { api_keys: keys(&["alpha"]), admin_keys: keys(&["boss"]), ..Options::default() };
    let mut server = TestServer::with(engine, options);
    let code = |result: Result<_, tonic::Status>| result.err().map_or(Code::Ok, |error: tonic::Status| error.code());
    for (key, expected) in
        [(None, Code::Unauthenticated), (Some("beta"), Code::Unauthenticated), (Some("alpha"), Code::Ok)]
    {
        let mut client = Client::connect(server.grpc);
        if let Some(key) = key {
            client = client.with("authorization", &format!("Bearer {key}"));
        }
        assert_eq!(code(client.generate(text("x", 2)).map(drop)), expected, "{key:?}");
        assert_eq!(code(client.stream(text("x", 2)).map(drop)), expected, "{key:?}");
        let call = client.call(GetServerInfoRequest {});
        assert_eq!(code(client.runtime.block_on(client.control.get_server_info(call)).map(drop)), expected, "{key:?}");
    }
    let mut alpha = Client::with_key(server.grpc, "alpha");
    let call = alpha.call(SleepRequest::default());
    assert_eq!(code(alpha.runtime.block_on(alpha.control.sleep(call)).map(drop)), Code::PermissionDenied);
    let call = alpha.call(ListLorasRequest {});
    assert_eq!(code(alpha.runtime.block_on(alpha.control.list_loras(call)).map(drop)), Code::Ok);
    let call = alpha.call(ShutdownRequest {});
    assert_eq!(code(alpha.runtime.block_on(alpha.control.shutdown(call)).map(drop)), Code::PermissionDenied);
    let mut boss = Client::with_key(server.grpc, "boss");
    let call = boss.call(SleepRequest::default());
    assert_eq!(code(boss.runtime.block_on(boss.control.sleep(call)).map(drop)), Code::FailedPrecondition, "pinned");
    let call = boss.call(ShutdownRequest {});
    assert_eq!(code(boss.runtime.block_on(boss.control.shutdown(call)).map(drop)), Code::Ok);
    drop((alpha, boss));
    server.join();
}

#[test]
fn messages_are_limited_like_bodies() {
    let (engine, _) = MockEngine::replying(" a cat");
    let limits = Limits { max_inflight_bytes: 4 << 20, ..Limits::default() };
    let server = TestServer::with(engine, Options { max_body: Some(100_000), limits, ..Options::default() });
    let mut client = Client::connect(server.grpc);
    let large = client.generate(text(&"x".repeat(200_000), 2)).unwrap_err();
    assert_eq!(large.code(), Code::ResourceExhausted, "{large}");
    assert!(large.message().contains("--max-body-size"), "{large}");
    let media = GenerateRequest { media: vec![MediaItem::default(); 40_000], ..text("x", 2) };
    let media = client.generate(media).unwrap_err();
    assert_eq!(media.code(), Code::ResourceExhausted, "80 kB that would become megabytes: {media}");
    let ids = GenerateRequest {
        prompt: Some(Prompt::TokenIds(vllm_proto::TokenIds { ids: vec![1; 90_000] })),
        ..text("", 2)
    };
    let ids = client.generate(ids).unwrap_err();
    assert_eq!(ids.code(), Code::InvalidArgument, "as many ids are read, but exceed the context: {ids}");
    client.generate(text("x", 2)).unwrap();
}

#[test]
fn a_call_beyond_a_limit_is_refused_and_counted() {
    let (engine, control) = MockEngine::replying(" a cat");
    control.allow(1);
    let limits = Limits { max_requests_per_key: NonZeroUsize::new(1), ..Limits::default() };
    let server = TestServer::with(engine, Options { limits, ..Options::default() });
    let [mut client, mut other] = [0; 2].map(|_| Client::connect(server.grpc));
    let mut stream = client.open(text("x", 9)).unwrap();
    client.next(&mut stream).unwrap();
    let error = other.generate(text("x", 2)).unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    assert!(error.metadata().contains_key("retry-after") && error.metadata().contains_key("x-request-id"), "{error:?}");
    control.allow(usize::MAX);
    while client.next(&mut stream).unwrap().is_some() {}
    let metrics = || get(server.address, "/metrics").text();
    let counted = |status: &str, method: &str| {
        let handler = format!("handler=\"/vllm.Inference/{method}\"");
        metrics()
            .lines()
            .any(|line| line.starts_with("http_requests") && line.contains(&handler) && line.contains(status))
    };
    wait_until("both are counted", || counted("\"429\"", "Generate") && counted("\"200\"", "GenerateStream"));
    assert!(metrics().contains("rate_limit_exceeded"));
}

#[test]
fn a_client_that_reads_no_stream_loses_its_connection() {
    let limit = Duration::from_millis(500);
    let (engine, _) = MockEngine::replying(" a cat sat on a mat");
    let options = Options { client_timeout: limit, ..Options::default() };
    let server = TestServer::start(engine.with_max_model_len(200_000), Setup { options, ..Setup::default() });
    let mut slow = Client::connect(server.grpc);
    let _unread = slow.open(text("x", 20_000)).unwrap();
    let mut other = Client::connect(server.grpc);
    let began = Instant::now();
    // The slow client's connection is alive meanwhile: it answers pings and reads other calls.
    loop {
        let call = slow.call(GetServerInfoRequest {});
        if slow.runtime.block_on(slow.control.get_server_info(call)).is_err() {
            break;
        }
        assert_eq!(other.generate(text("x", 5)).unwrap().outputs.unwrap().num_tokens, 5);
        assert!(began.elapsed() < Duration::from_secs(20), "its stream still waits");
        std::thread::sleep(Duration::from_millis(20));
    }
    server.wait_idle();
    assert!(began.elapsed() >= limit, "{:?}", began.elapsed());
}

#[test]
fn unread_streams_stay_within_the_budget() {
    let (engine, _) = MockEngine::replying(" a cat sat on a mat");
    let limits = Limits { max_inflight_bytes: 1 << 20, ..Limits::default() };
    let options = Options { limits, ..Options::default() };
    let server = TestServer::start(engine.with_max_model_len(200_000), Setup { options, ..Setup::default() });
    let mut slow = Client::connect(server.grpc);
    let unread: Vec<_> = (0..8).map(|_| slow.open(text("x", 20_000)).unwrap()).collect();
    let rejected = || {
        let metrics = get(server.address, "/metrics").text();
        metrics.lines().any(|line| line.contains("unread_output") && !line.ends_with(" 0"))
    };
    let began = Instant::now();
    while !rejected() {
        assert!(began.elapsed() < Duration::from_secs(60), "its connection is open");
        std::thread::sleep(Duration::from_millis(20));
    }
    server.wait_idle();
    drop(unread);
    Client::connect(server.grpc).generate(text("x", 5)).unwrap();
}

#[test]
fn other_protocols_and_silence_are_ended() {
    let (engine, _) = MockEngine::replying(" a cat");
    let options = Options { client_timeout: Duration::from_millis(300), ..Options::default() };
    let server = TestServer::with(engine, options);
    for sent in [&b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"[..], b"", b"PRI * HTTP/2.0\r\n", &[0; 5000]] {
        let mut connection = TcpStream::connect(server.grpc).unwrap();
        connection.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        connection.write_all(sent).unwrap();
        let mut read = vec![];
        let _ = connection.read_to_end(&mut read);
        assert!(read.is_empty(), "{read:?}");
    }
    // The preface, then frames that are none.
    let mut connection = TcpStream::connect(server.grpc).unwrap();
    connection.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    connection.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
    connection.write_all(&[255; 64]).unwrap();
    let _ = connection.read_to_end(&mut vec![]);
    Client::connect(server.grpc).generate(text("x", 2)).unwrap();
}

#[test]
fn streams_count_as_connections() {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(0);
    let limits = Limits { max_connections: NonZeroUsize::new(8), ..Limits::default() };
    let server = TestServer::with(engine, Options { limits, ..Options::default() });
    let mut client = Client::connect(server.grpc);
    let mut refused = vec![];
    let mut streams = vec![];
    for _ in 0..12 {
        match client.open(text("x", 2)) {
            Ok(stream) => streams.push(stream),
            Err(error) => refused.push(error),
        }
    }
    assert!((3..8).contains(&streams.len()), "{} streams", streams.len());
    assert!(refused.iter().all(|error| error.code() == Code::Unavailable), "{:?}", refused[0]);
    assert_eq!(get(server.address, "/health").status, 200);
    control.allow(usize::MAX);
    for mut stream in streams {
        while client.next(&mut stream).unwrap().is_some() {}
    }
    client.generate(text("x", 2)).unwrap();
}
