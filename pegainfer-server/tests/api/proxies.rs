//! Streams with a late first token, through proxies that close idle connections.
//!
//! The times correspond to proxies with a limit of a minute and a prefill of five minutes, divided by 120.

use crate::support::client::{Response, post_unread, read_head};
use crate::support::mock::{Control, MockEngine};
use crate::support::temp_dir::TempDir;
use crate::support::{TestServer, proxy, wait_until};
use pegainfer_server::app::Options;
use serde_json::{Value, json};
use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::Duration;

/// Idle time after which the proxy closes a connection.
const IDLE: Duration = Duration::from_millis(500);

/// Path, body, and end of a complete stream of each API.
fn apis() -> [(&'static str, Value, &'static str); 4] {
    let messages = json!([{"role": "user", "content": "x"}]);
    [
        ("/v1/completions", json!({"prompt": "x", "stream": true}), "data: [DONE]\n\n"),
        ("/v1/chat/completions", json!({"messages": messages, "stream": true}), "data: [DONE]\n\n"),
        ("/v1/responses", json!({"input": "x", "stream": true}), "event: response.completed\n"),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 9, "stream": true}),
            "data: {\"type\":\"message_stop\"}\n\n",
        ),
    ]
}

/// A server whose prefill takes until the test allows tokens.
fn server(keep_alive_interval: Duration) -> (TestServer, Arc<Control>) {
    let (engine, control) = MockEngine::replying(" a cat sat");
    control.allow(0);
    (TestServer::with(engine, Options { keep_alive_interval, ..Options::default() }), control)
}

/// Streams through the proxy in all APIs at the same time, with a prefill of `prefill`. Returns the clients' texts.
fn streams(server: &TestServer, control: &Control, proxy: SocketAddr, prefill: Duration) -> Vec<String> {
    let open: Vec<TcpStream> = apis().iter().map(|(path, body, _)| post_unread(proxy, path, body)).collect();
    wait_until("the requests are there", || control.added() == open.len());
    std::thread::sleep(prefill);
    control.allow(usize::MAX);
    let whole = |stream: TcpStream| {
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let response: Response = read_head(stream);
        assert_eq!(response.status, 200);
        let mut text = String::new();
        // A proxy that gave up cuts the response off.
        let _ = response.reader().read_to_string(&mut text);
        text
    };
    let texts = open.into_iter().map(whole).collect();
    server.wait_idle();
    texts
}

fn all_are_whole(texts: &[String]) {
    for ((path, _, end), text) in apis().iter().zip(texts) {
        assert!(text.contains(end) && text.contains("sat"), "{path}: {text}");
    }
}

#[test]
fn streams_outlive_the_idle_limit_of_a_proxy() {
    let (server, control) = server(IDLE / 4);
    let proxy = proxy::start(server.address, IDLE);
    all_are_whole(&streams(&server, &control, proxy, 5 * IDLE));
}

#[test]
fn a_silent_stream_is_cut_off_by_the_proxy() {
    let (server, control) = server(60 * IDLE);
    let proxy = proxy::start(server.address, IDLE);
    for (text, (path, _, end)) in streams(&server, &control, proxy, 2 * IDLE).iter().zip(apis()) {
        assert!(!text.contains(end), "{path}: {text}");
    }
}

/// A proxy of the system in front of a server.
struct RealProxy {
    child: Child,
    address: SocketAddr,
    _dir: TempDir,
}

impl RealProxy {
    /// Starts the program with a configuration that only forwards. All limits have the usual minute.
    fn start(program: &Path, server: SocketAddr) -> Self {
        let name = program.file_name().unwrap().to_str().unwrap();
        let dir = TempDir::new(&format!("proxy-{name}"));
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let (path, file) = (dir.0.display(), dir.0.join("config"));
        let is_nginx = name == "nginx";
        let config = if is_nginx {
            // Default settings: proxy_read_timeout is 60 s, and proxy_buffering is on.
            format!(
                "daemon off; pid {path}/pid; error_log {path}/error; events {{}}\nhttp {{ access_log off; \
                 client_body_temp_path {path}/b; proxy_temp_path {path}/p; fastcgi_temp_path {path}/f; \
                 uwsgi_temp_path {path}/u; scgi_temp_path {path}/s;\n\
                 server {{ listen {address}; location / {{ proxy_pass http://{server}; }} }} }}\n"
            )
        } else {
            format!(
                "defaults\n mode http\n timeout connect 5s\n timeout client 60s\n timeout server 60s\n\
                 listen l\n bind {address}\n server s {server}\n"
            )
        };
        std::fs::write(&file, config).unwrap();
        let flag = if is_nginx { "-c" } else { "-f" };
        let child = Command::new(program).arg(flag).arg(&file).spawn().unwrap();
        let this = Self { child, address, _dir: dir };
        wait_until("the proxy listens", || TcpStream::connect(address).is_ok());
        this
    }
}

impl Drop for RealProxy {
    fn drop(&mut self) {
        // nginx ends its workers when it is asked to end.
        let _ = Command::new("kill").arg(self.child.id().to_string()).status();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "takes five minutes and needs nginx or HAProxy: PEGAINFER_TEST_PROXIES=PROGRAM:PROGRAM"]
fn streams_outlive_the_idle_limit_of_real_proxies() {
    let programs = std::env::var_os("PEGAINFER_TEST_PROXIES").expect("PEGAINFER_TEST_PROXIES is not set");
    let programs: Vec<PathBuf> = std::env::split_paths(&programs).collect();
    std::thread::scope(|scope| {
        for program in &programs {
            scope.spawn(|| {
                let (server, control) = server(Options::default().keep_alive_interval);
                let proxy = RealProxy::start(program, server.address);
                let texts = streams(&server, &control, proxy.address, Duration::from_secs(300));
                all_are_whole(&texts);
                println!("{}: all streams are whole", program.display());
            });
        }
    });
}
