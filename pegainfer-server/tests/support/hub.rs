//! A mock of the Hugging Face hub: metadata, ranges, no redirects, and connections that break off on demand (fault injection).

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// The commit of every file.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Behaviour of the hub, and the requests it has seen.
#[derive(Default)]
pub struct Behaviour {
    /// Files of `test/tiny`.
    pub files: BTreeMap<String, Vec<u8>>,
    /// Status of every response.
    pub refuse: Option<u16>,
    /// Fault injection: file whose next downloads break off, bytes before the break, and number of downloads.
    pub break_off: Option<(String, usize, usize)>,
    /// `path range authorization` of each request.
    pub seen: Vec<String>,
}

/// A hub on a free port.
pub struct Hub {
    pub address: SocketAddr,
    pub behaviour: Arc<Mutex<Behaviour>>,
}

impl Hub {
    /// Serves `files`.
    pub fn start(files: BTreeMap<String, Vec<u8>>) -> Self {
        let behaviour = Arc::new(Mutex::new(Behaviour { files, ..Behaviour::default() }));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = behaviour.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = shared.clone();
                std::thread::spawn(move || respond(stream, &shared));
            }
        });
        Self { address, behaviour }
    }

    /// The requests so far.
    pub fn seen(&self) -> Vec<String> {
        self.behaviour.lock().unwrap().seen.clone()
    }
}

fn respond(stream: TcpStream, behaviour: &Mutex<Behaviour>) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let path = line.split(' ').nth(1)?.to_string();
    let (mut range, mut authorization) = (None, String::new());
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        let Some((name, value)) = header.trim_end().split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "range" => range = value.strip_prefix("bytes=").map(str::to_string),
            "authorization" => authorization = value.to_string(),
            _ => {}
        }
    }
    let mut behaviour = behaviour.lock().unwrap();
    behaviour.seen.push(format!("{path} {} {authorization}", range.as_deref().unwrap_or("-")));
    if let Some(status) = behaviour.refuse {
        return send(stream, status, &[], b"no");
    }
    if path == "/api/models/test/tiny/revision/main" {
        let siblings: Vec<_> = behaviour.files.keys().map(|name| serde_json::json!({"rfilename": name})).collect();
        let info = serde_json::json!({"sha": COMMIT, "siblings": siblings}).to_string();
        return send(stream, 200, &[("Content-Type", "application/json")], info.as_bytes());
    }
    let name = path.strip_prefix(&format!("/test/tiny/resolve/{COMMIT}/")).map(str::to_string);
    let Some((name, body)) = name.and_then(|name| Some((name.clone(), behaviour.files.get(&name)?.clone()))) else {
        return send(stream, 404, &[], b"no");
    };
    let (start, end) = range.as_deref().and_then(|r| r.split_once('-')).unwrap_or(("0", ""));
    let start: usize = start.parse().ok()?;
    let end = end.parse().map_or(body.len(), |last: usize| (last + 1).min(body.len()));
    let part = &body[start.min(end)..end];
    let headers = [
        ("ETag", format!("\"{name}-1\"")),
        ("X-Repo-Commit", COMMIT.to_string()),
        ("Content-Range", format!("bytes {start}-{}/{}", end.saturating_sub(1), body.len())),
    ];
    let headers: Vec<(&str, &str)> = headers.iter().map(|(n, v)| (*n, v.as_str())).collect();
    match &mut behaviour.break_off {
        Some((broken, bytes, times)) if *broken == name && *times > 0 && part.len() > 1 => {
            *times -= 1;
            let cut = part[..part.len().min(*bytes)].to_vec();
            send_promising(stream, 206, &headers, part.len(), &cut)
        }
        _ => send(stream, 206, &headers, part),
    }
}

fn send(stream: TcpStream, status: u16, headers: &[(&str, &str)], body: &[u8]) -> Option<()> {
    send_promising(stream, status, headers, body.len(), body)
}

/// Announces `length` bytes and sends `body`.
fn send_promising(
    mut stream: TcpStream,
    status: u16,
    headers: &[(&str, &str)],
    length: usize,
    body: &[u8],
) -> Option<()> {
    let mut head = format!("HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {length}\r\n");
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    stream.write_all((head + "\r\n").as_bytes()).ok()?;
    stream.write_all(body).ok()
}
