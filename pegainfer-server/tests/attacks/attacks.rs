//! Attacks on memory and time, scaled down: a hostile client must cost other clients nothing.

use crate::support::attack::{AttackedServer, KEY, limit, metric, post_text, together};
use crate::support::client::{Response, post, post_with, send, write};
use crate::support::process::{pegainfer, run};
use crate::support::usage::status;
use crate::support::{endless_template, wait_until};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const MIB: usize = 1 << 20;
/// API key of the attacker, on servers with keys.
const HOSTILE: &str = "hostile";

/// Announces a body of `length` bytes and sends only `body`, or the part of it that the server accepts within a second.
fn announce(address: SocketAddr, length: usize, body: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    );
    // The server may stop reading, or refuse the rest.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    stream
}

/// A list of `n` zeros.
fn zeros(n: usize) -> String {
    format!("[{}0]", "0,".repeat(n - 1))
}

/// A chat with a tool whose schema has `n` values.
fn chat_with_tools(n: usize) -> String {
    let tool = format!(r#"{{"type":"function","function":{{"name":"f","parameters":{{"enum":{}}}}}}}"#, zeros(n));
    format!(r#"{{"messages":[{{"role":"user","content":"x"}}],"n":128,"max_tokens":1,"tools":[{tool}]}}"#)
}

/// Statuses of the responses to the same body, sent by `n` clients at once.
fn statuses(n: usize, address: SocketAddr, path: &str, body: &str) -> Vec<u16> {
    together(n, |_| post_text(address, path, body).0)
}

/// Headers of a hostile client with its own key.
fn hostile() -> [(&'static str, &'static str); 2] {
    [("Content-Type", "application/json"), ("x-api-key", HOSTILE)]
}

/// The response to a completion of the hostile client.
fn complete(address: SocketAddr, body: &Value) -> Response {
    send(address, "POST", COMPLETIONS, &hostile(), body.to_string().as_bytes())
}

/// The message of a refusal with status 400.
fn refusal(address: SocketAddr, body: &Value) -> String {
    let response = complete(address, body);
    assert_eq!(response.status, 400);
    response.json()["error"]["message"].as_str().unwrap().to_string()
}

#[test]
fn bodies_and_prompts_of_megabytes() {
    let mut target = AttackedServer::start(&[]);
    target.attack("1,700 bodies of 8 MB are announced and none is sent", |address| {
        let open: Vec<TcpStream> = (0..1700).map(|_| announce(address, 8 * MIB, b"{")).collect();
        std::thread::sleep(Duration::from_millis(500));
        drop(open);
    });
    target.attack("180 bodies of 8 MB are held one byte short", |address| {
        let body = vec![b' '; 8 * MIB - 1];
        drop(together(180, |_| announce(address, 8 * MIB, &body)));
    });
    target.attack("a prompt of 7.8 MB with 128 choices", |address| {
        let prompt = "0, ".repeat(2_600_000);
        assert_eq!(statuses(2, address, COMPLETIONS, &json!({"prompt": prompt, "n": 128}).to_string()), [400; 2]);
    });
    target.attack("four million token ids with 128 choices", |address| {
        let body = format!(r#"{{"prompt":{},"n":128}}"#, zeros(4_000_000));
        assert_eq!(statuses(2, address, COMPLETIONS, &body), [413; 2]);
    });
    target.attack("tool definitions of 8 MB with 128 choices", |address| {
        assert_eq!(statuses(2, address, CHAT, &chat_with_tools(3_900_000)), [413; 2]);
    });
    target.attack("900,000 values in tool definitions with 128 choices", |address| {
        assert_eq!(statuses(2, address, CHAT, &chat_with_tools(900_000)), [400; 2]);
    });
    target.attack("8 bodies of 8 MB of zeros and 8 chats of 8 MB", |address| {
        let zeros = format!(r#"{{"x":{}}}"#, zeros(4 * MIB - 16));
        let chat = json!({"messages": [{"role": "user", "content": "word ".repeat(8 * MIB / 5 - 64)}]}).to_string();
        let bodies = [(COMPLETIONS, &zeros), (CHAT, &chat)];
        let statuses = together(16, |i| post_text(address, bodies[i % 2].0, bodies[i % 2].1).0);
        assert_eq!(statuses, [413, 400].repeat(8));
    });
}

/// A text that defeats the tokenizer's caches: one word of letters from a linear congruential generator.
fn random_letters(length: usize) -> String {
    let mut state = 1u32;
    let mut letter = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        char::from(b'a' + (state >> 24) as u8 % 26)
    };
    (0..length).map(|_| letter()).collect()
}

#[test]
fn texts_of_megabytes_are_tokenized() {
    let mut target = AttackedServer::start(&[]);
    target.attack("the tokens of 4 texts of 2 MB of digits, with their strings", |address| {
        let body = json!({"prompt": "7".repeat(2 * MIB), "return_token_strs": true}).to_string();
        assert_eq!(statuses(4, address, "/tokenize", &body), [200; 4]);
    });
    let letters = random_letters(6 * MIB);
    target.attack("texts of 3 MB without spaces, of emoji and of random letters, three at a time", |address| {
        for text in [&*"a".repeat(3 * MIB), &*"🎉👩👧".repeat(250_000), &letters[..3 * MIB]] {
            assert_eq!(statuses(3, address, "/tokenize", &json!({ "prompt": text }).to_string()), [200; 3]);
        }
    });
    target.attack("a text of 6 MB whose deadline passes", |address| {
        let began = Instant::now();
        let late = post_with(address, "/tokenize", ("x-request-timeout", "0.1"), &json!({ "prompt": letters }));
        assert_eq!(late.status, 504, "the deadline covers the tokenizer");
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    });
    target.attack("the text of 800,000 token ids, four times", |address| {
        assert_eq!(statuses(4, address, "/detokenize", &format!(r#"{{"tokens":{}}}"#, zeros(800_000))), [200; 4]);
    });
}

#[test]
fn responses_of_megabytes() {
    let mut target = AttackedServer::start(&["--api-key", KEY, "--api-key", HOSTILE]);
    target.attack("log-probabilities of a prompt of 4,090 tokens for 128 choices", |address| {
        let body = json!({"prompt": vec![5; 4090], "n": 128, "echo": true, "logprobs": 20, "max_tokens": 1});
        let message = refusal(address, &body);
        assert!(message.contains("(--max-response-bytes)"), "{message}");
    });
    target.attack("800 tokens with 20 log-probabilities each for 128 choices", |address| {
        let body = json!({"prompt": "x", "n": 128, "logprobs": 20, "max_tokens": 800, "ignore_eos": true});
        assert!(refusal(address, &body).contains("at most 67108864 are given"));
    });
    target.attack("log-probabilities of a prompt for 8 choices, computed once", |address| {
        let body = json!({"prompt": vec![5; 2000], "n": 8, "echo": true, "logprobs": 20, "max_tokens": 1});
        let response = complete(address, &body).json();
        let reports: Vec<&[Value]> = response["choices"].as_array().unwrap().iter().map(report).collect();
        assert_eq!((reports.len(), reports[0].len()), (8, 2000));
        assert!(reports.iter().all(|report| report == &reports[0]));
    });
    target.attack("20 log-probabilities of each of 10,000 tokens, plain and streamed", |address| {
        for stream in [false, true] {
            let body = json!({"prompt": "x", "n": 20, "logprobs": 20, "max_tokens": 500, "ignore_eos": true, "stream": stream});
            let response = complete(address, &body);
            assert_eq!(response.status, 200);
            assert!(response.text().len() > 3 * MIB);
        }
    });
    target.attack("log-probabilities of a prompt for 8 choices, streamed", |address| {
        let body =
            json!({"prompt": vec![5; 2000], "n": 8, "echo": true, "logprobs": 20, "max_tokens": 1, "stream": true});
        assert!(complete(address, &body).text().len() > 5 * MIB);
    });
}

/// The choice's report about the first 2,000 tokens.
fn report(choice: &Value) -> &[Value] {
    &choice["logprobs"]["top_logprobs"].as_array().unwrap()[..2000]
}

/// Opens a connection 2 ms after the previous one. A new connection is not closed for the next 190, which leaves any
/// client the time to send its request.
fn paced(open: impl Fn() -> TcpStream) -> TcpStream {
    std::thread::sleep(Duration::from_millis(2));
    open()
}

#[test]
fn more_connections_than_files() {
    let mut target =
        AttackedServer::start_with(&["--client-timeout", "10"], |command| limit(command, Resource::Nofile, 256));
    target.attack("300 idle connections where 256 files may be open", |address| {
        let idle: Vec<TcpStream> = (0..300).map(|_| paced(|| TcpStream::connect(address).unwrap())).collect();
        std::thread::sleep(Duration::from_secs(1));
        drop(idle);
    });
    target.attack("500 bodies that come a byte at a time", |address| {
        let mut slow: Vec<TcpStream> = (0..500).map(|_| paced(|| announce(address, MIB, b"{"))).collect();
        for _ in 0..10 {
            slow.iter_mut().for_each(|stream| drop(stream.write(b" ")));
            std::thread::sleep(Duration::from_millis(100));
        }
    });
}

#[test]
fn a_chat_template_that_never_ends() {
    let dir = endless_template("attack");
    let mut target = AttackedServer::start(&["--model-path", dir.0.to_str().unwrap()]);
    target.attack("two chats through an endless template", |address| {
        let body = json!({"messages": [{"role": "user", "content": "x"}]}).to_string();
        assert_eq!(statuses(2, address, CHAT, &body), [400; 2]);
    });
}

#[test]
fn a_chat_template_that_makes_gigabytes() {
    let dir = endless_template("attack-memory");
    let text = "{% if messages[0].content == 'replace' %}{{ ('x' * 1000000)|replace('x', 'y' * 10000)|length }}{% else %}\
        {% set ns = namespace(x=[1, 2]) %}{% for i in range(90) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{% endif %}";
    std::fs::write(dir.0.join("chat_template.jinja"), text).unwrap();
    let mut target = AttackedServer::start(&["--model-path", dir.0.to_str().unwrap()]);
    target.attack("chats through a template that takes any memory", |address| {
        for content in ["replace", "lists"] {
            let body = json!({"messages": [{"role": "user", "content": content}]}).to_string();
            assert_eq!(statuses(2, address, CHAT, &body), [400; 2]);
        }
    });
}

#[test]
fn a_client_that_fills_the_queue() {
    let mut target = AttackedServer::start(&["--api-key", KEY, "--api-key", HOSTILE]);
    target.attack("700 choices of one key", |address| {
        let body = json!({"prompt": "x", "n": 100, "max_tokens": 4000, "ignore_eos": true, "stream": true}).to_string();
        let open: Vec<TcpStream> =
            (0..7).map(|_| write(address, "POST", COMPLETIONS, &hostile(), body.as_bytes())).collect();
        wait_until("all wait or run", || metric(address, "vllm:num_requests_waiting") > 600.0);
        std::thread::sleep(Duration::from_secs(2));
        drop(open);
    });
}

/// A legal schema that takes nearly a second to compile, in a body with ignored values.
fn slow_schema(number: usize, ignored: usize) -> Value {
    let properties = |prefix: usize| -> serde_json::Map<_, _> {
        (0..980).map(|i| (format!("{prefix}_{i}_{number}"), json!({}))).collect()
    };
    let objects: serde_json::Map<_, _> =
        (0..5).map(|i| (format!("o{i}"), json!({"type": "object", "properties": properties(i)}))).collect();
    let schema = json!({"type": "object", "properties": objects});
    json!({"prompt": "x", "max_tokens": 4, "structured_outputs": {"json": schema}, "x": vec![0; ignored]})
}

/// Sends other requests of an ordinary client: a chat of 3 KB in 41 messages, a text, and a new schema.
fn ordinary_requests(address: SocketAddr, number: usize) {
    let message = |i: usize| json!({"role": if i.is_multiple_of(2) { "user" } else { "assistant" }, "content": "word ".repeat(15)});
    let schema = json!({"type": "object", "properties": {format!("n{number}"): {"type": "integer"}}});
    for (path, body) in [
        (CHAT, json!({"messages": (0..41).map(message).collect::<Vec<_>>(), "max_tokens": 1})),
        ("/tokenize", json!({"prompt": "word ".repeat(10_000)})),
        (COMPLETIONS, json!({"prompt": "x", "max_tokens": 1, "structured_outputs": {"json": schema}})),
    ] {
        let response = post_with(address, path, ("x-api-key", KEY), &body);
        let (status, text) = (response.status, response.text());
        assert_eq!(status, 200, "{path}: {text}");
    }
}

#[test]
fn schemas_that_take_a_second_each() {
    let mut target = AttackedServer::start(&["--api-key", KEY, "--api-key", HOSTILE]);
    target.attack("60 slow schemas, some with 800,000 ignored values", |address| {
        let bodies: Vec<String> =
            (0..60).map(|i| slow_schema(i, if i.is_multiple_of(6) { 800_000 } else { 0 }).to_string()).collect();
        let open = together(60, |i| write(address, "POST", COMPLETIONS, &hostile(), bodies[i].as_bytes()));
        (0..5).for_each(|number| ordinary_requests(address, number));
        let is_answered = |stream: &&TcpStream| {
            stream.set_nonblocking(true).unwrap();
            stream.peek(&mut [0]).is_ok()
        };
        let answered = open.iter().filter(is_answered).count();
        assert!(answered < 30, "the ordinary client waited for {answered} of 60 requests");
    });
}

#[test]
fn a_machine_without_files_threads_or_memory_is_not_the_client_s_fault() {
    let mut command = pegainfer();
    limit(&mut command, Resource::Nofile, 20);
    let (code, _, error) = run(&mut command);
    assert_eq!(code, Some(1));
    assert!(error.contains("only 20 files may be open") && error.contains("(ulimit -n)"), "{error}");

    let target = AttackedServer::start(&[]);
    // Too little for the stack of a thread that compiles a grammar.
    let limit = Some(status(target.pid(), "VmSize:") + (8 << 20));
    let pid = Pid::from_raw(target.pid() as i32);
    prlimit(pid, Resource::As, Rlimit { current: limit, maximum: limit }).unwrap();
    let schema = json!({"prompt": "x", "max_tokens": 4, "structured_outputs": {"json": {"type": "array"}}});
    let refused = post(target.address(), COMPLETIONS, &schema);
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")));
    assert_eq!(refused.json()["error"]["code"], "server_overloaded");
    let ordinary = json!({"prompt": "x", "max_tokens": 4});
    assert_eq!(post(target.address(), COMPLETIONS, &ordinary).status, 200);
}
