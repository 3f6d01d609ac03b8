//! Images on other servers, which are fetched from allowed hosts only.

use super::{CHAT, MESSAGES, RESPONSES, chat, fixture, image, prompt_ids, refusal, server_with, user};
use crate::support::TestServer;
use crate::support::client::{get, post_ok};
use pegainfer_server::api::ImageFetcher;
use pegainfer_server::app::Options;
use pegainfer_server::image_hosts::ImageHost;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// A host of files, which counts its requests. It ends with the test's process.
struct Host {
    address: SocketAddr,
    requests: Arc<AtomicUsize>,
}

impl Host {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, requests) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
        let counted = requests.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                counted.fetch_add(1, Ordering::Relaxed);
                std::thread::spawn(move || answer(stream, address));
            }
        });
        Self { address, requests }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    fn requests(&self) -> usize {
        self.requests.load(Ordering::Relaxed)
    }
}

/// Answers one request by its path.
fn answer(mut stream: TcpStream, address: SocketAddr) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let Some(first) = lines.next() else { return };
    let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    assert!(!head.iter().any(|line| line.to_lowercase().starts_with("authorization")), "{head:?}");
    let path = first.split(' ').nth(1).unwrap();
    let file = |headers: &str, bytes: &[u8]| {
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n{headers}\r\n", bytes.len());
        [head.as_bytes(), bytes].concat()
    };
    let to = |location: &str| {
        format!("HTTP/1.1 302 Found\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n").into_bytes()
    };
    let response = match path {
        "/text" => file("content-type: image/png\r\n", b"<html>no image</html>"),
        "/packed" => file("content-encoding: gzip\r\n", b"abc"),
        "/announced" => b"HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n".to_vec(),
        "/short" => b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\nabc".to_vec(),
        "/endless" => {
            // Fails when the server has had enough.
            let mut response = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
            while stream.write_all(&response).is_ok() {
                response = [b"10000\r\n".as_slice(), &[7; 0x10000], b"\r\n"].concat();
            }
            return;
        }
        "/silent" => {
            std::thread::sleep(Duration::from_secs(5));
            return;
        }
        "/loop" => to("/loop"),
        "/nowhere" => b"HTTP/1.1 302 Found\r\ncontent-length: 0\r\n\r\n".to_vec(),
        "/again" => to("/sources/small.png"),
        "/inside" => to(&format!("http://localhost:{}/sources/small.png", address.port())),
        "/metadata" => to("http://169.254.169.254/latest"),
        "/file" => to("file:///etc/passwd"),
        path if path.starts_with("/sources/") => file("", &fixture(path.split('?').next().unwrap().trim_matches('/'))),
        _ => b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".to_vec(),
    };
    let _ = stream.write_all(&response);
}

fn server(hosts: &[&str]) -> TestServer {
    let hosts: Vec<ImageHost> = hosts.iter().map(|host| ImageHost::parse(host).unwrap()).collect();
    server_with(&[], Options { image_fetcher: Some(ImageFetcher::new(&hosts).unwrap()), ..Options::default() })
}

fn part(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url}})
}

fn refused(server: &TestServer, url: &str) -> String {
    let (status, error) = refusal(server, CHAT, &chat(json!([user(json!([part(url)]))])));
    assert_eq!((status, &error["code"]), (400, &json!("invalid_image")), "{url}: {error}");
    let message = error["message"].as_str().unwrap();
    message.strip_prefix("messages[0].content[0]: ").unwrap_or_else(|| panic!("{message}")).to_owned()
}

#[test]
fn images_of_allowed_hosts_are_read_in_every_api() {
    let (host, server) = (Host::start(), server(&["127.0.0.1"]));
    let sent = prompt_ids(&server, json!([user(json!([image("small.png"), image("photo.jpg")]))]));
    for paths in [["/sources/small.png", "/sources/photo.jpg"], ["/again", "/sources/photo.jpg?size=1#top"]] {
        let parts = paths.map(|path| part(&host.url(path)));
        assert_eq!(prompt_ids(&server, json!([user(json!(parts))])), sent, "{paths:?}");
    }
    let url = host.url("/sources/small.png");
    let source = json!({"type": "url", "url": url});
    let body = json!({"messages": [user(json!([{"type": "image", "source": source}]))], "max_tokens": 1});
    let counted = post_ok(server.address, "/v1/messages/count_tokens", &body);
    let answered = post_ok(server.address, MESSAGES, &body);
    assert_eq!(counted["input_tokens"], answered["usage"]["input_tokens"]);
    let input = json!([user(json!([{"type": "input_image", "image_url": url}]))]);
    let answered = post_ok(server.address, RESPONSES, &json!({"input": input, "max_output_tokens": 1}));
    assert_eq!(counted["input_tokens"], answered["usage"]["input_tokens"]);
    server.wait_idle();
}

#[test]
fn hosts_that_are_not_allowed_are_not_asked() {
    let (host, server) = (Host::start(), server(&["*", "images.invalid"]));
    let port = host.address.port();
    for (url, words) in [
        (host.url("/sources/small.png"), "no public address"),
        (format!("http://localhost:{port}/sources/small.png"), "no public address"),
        (format!("http://[::1]:{port}/a.png"), "no public address"),
        (format!("http://[::ffff:127.0.0.1]:{port}/a.png"), "no public address"),
        (format!("http://2130706433:{port}/a.png"), "no public address"),
        (format!("http://0x7f.1:{port}/a.png"), "no public address"),
        (format!("http://127.1:{port}/a.png"), "no public address"),
        ("http://169.254.169.254/latest/meta-data".into(), "no public address"),
        ("http://a:b@example.com/a.png".into(), "name or password"),
        ("http:///a.png".into(), "is not a URL"),
        ("https://exa mple.com/a.png".into(), "is not a URL"),
    ] {
        let message = refused(&server, &url);
        assert!(message.contains(words), "{url}: {message}");
    }
    let named = self::server(&["example.com"]);
    let message = refused(&named, &host.url("/sources/small.png"));
    assert!(message.starts_with("images may not be fetched from 127.0.0.1, which --allowed-image-hosts"), "{message}");
    assert_eq!(host.requests(), 0);
}

#[test]
fn redirects_lead_to_allowed_hosts_only() {
    let (host, server) = (Host::start(), server(&["127.0.0.1"]));
    for (path, words) in [
        ("/inside", "may not be fetched from localhost"),
        ("/metadata", "may not be fetched from 169.254.169.254"),
        ("/file", "is not a URL"),
        ("/nowhere", "status 302"),
        ("/loop", "redirected more than 3 times"),
    ] {
        let message = refused(&server, &host.url(path));
        assert!(message.contains(words), "{path}: {message}");
    }
    assert_eq!(host.requests(), 4 + 4, "one for each, and three more in the loop");
}

#[test]
fn bad_responses_are_refused_and_take_no_memory() {
    let (host, server) = (Host::start(), server(&["127.0.0.1"]));
    for (path, words) in [
        ("/missing", "status 404"),
        ("/text", "HTML document"),
        ("/packed", "Content-Encoding"),
        ("/announced", "has more than 20971520 bytes"),
        ("/endless", "has more than 20971520 bytes"),
        ("/short", "breaks off"),
    ] {
        let message = refused(&server, &host.url(path));
        assert!(message.contains(words), "{path}: {message}");
    }
    // Two files of 20 MiB fit the limit of one, not that of all.
    let parts = ["/endless", "/endless"].map(|path| part(&host.url(path)));
    let (status, error) = refusal(&server, CHAT, &chat(json!([user(json!(parts))])));
    assert_eq!((status, &error["code"]), (400, &json!("invalid_image")), "{error}");
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    assert!(refused(&server, &format!("http://{free}/a.png")).contains("cannot be reached"));
    server.wait_idle();
    assert_eq!(get(server.address, "/health").status, 200);
}

#[test]
fn a_slow_host_ends_at_the_deadline_of_the_request() {
    let host = Host::start();
    let fetcher = ImageFetcher::new(&[ImageHost::parse("127.0.0.0/8").unwrap()]).unwrap();
    let timeout = Some(Duration::from_millis(300));
    let options = Options { image_fetcher: Some(fetcher), request_timeout: timeout, ..Options::default() };
    let server = server_with(&[], options);
    let (status, error) = refusal(&server, CHAT, &chat(json!([user(json!([part(&host.url("/silent"))]))])));
    assert_eq!(status, 504, "{error}");
    server.wait_idle();
}
