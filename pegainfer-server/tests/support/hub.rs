//! A mock of the Hugging Face hub, and of ModelScope: listings, ranges, and arbitrary responses (fault injection).

use ring::digest;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The commit of every file.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Decides about a request by path and first byte of its range. `None` serves it normally.
pub type Fault = Box<dyn Fn(&str, Option<usize>) -> Option<Response> + Send>;

/// Behaviour of the hub, and the requests it has seen.
#[derive(Default)]
pub struct Behaviour {
    /// Files of `test/tiny`; safetensors are in large file storage.
    pub files: BTreeMap<String, Vec<u8>>,
    /// Status of every response.
    pub refuse: Option<u16>,
    /// Fault injection: file with interrupted downloads, bytes before each break, and number of downloads.
    pub break_off: Option<(String, usize, usize)>,
    /// Fault injection: replaces responses.
    pub fault: Option<Fault>,
    /// Fault injection: changes of the listing.
    pub listing: Option<fn(&mut Value)>,
    /// True to speak ModelScope's API.
    pub modelscope: bool,
    /// Bytes per second of each connection.
    pub rate: Option<usize>,
    /// `path range authorization` of each request.
    pub seen: Vec<String>,
    /// Bytes of all bodies that were to be sent.
    pub sent: usize,
}

/// A response.
pub struct Response {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: Body,
}

/// Body of a response.
pub enum Body {
    /// The bytes, and their number in the head.
    Whole(Vec<u8>),
    /// A length in the head, the bytes, and then the end of the connection.
    Cut(usize, Vec<u8>),
    /// A length in the head, the bytes, and then nothing until the client leaves.
    Stalled(usize, Vec<u8>),
    /// A length in the head, and a byte every 150 ms.
    Slow(usize),
    /// Zeros without a length in the head, until the client leaves.
    Endless,
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
                std::thread::spawn(move || serve(stream, &shared));
            }
        });
        Self { address, behaviour }
    }

    /// The requests so far.
    pub fn seen(&self) -> Vec<String> {
        self.behaviour.lock().unwrap().seen.clone()
    }
}

fn serve(stream: TcpStream, behaviour: &Mutex<Behaviour>) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let path = line.split(' ').nth(1)?.to_string();
    let (mut from, mut end, mut authorization, mut cookie) = (None, None, String::new(), String::new());
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        let Some((name, value)) = header.trim_end().split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "range" => {
                let (first, last) = value.strip_prefix("bytes=")?.split_once('-')?;
                (from, end) = (first.parse().ok(), last.parse::<usize>().ok().map(|last| last + 1));
            }
            "authorization" => authorization = value.to_string(),
            "cookie" => cookie = format!(" {value}"),
            _ => {}
        }
    }
    let (response, rate) = {
        let mut behaviour = behaviour.lock().unwrap();
        let response = respond(&mut behaviour, &path, (from, end), &(authorization + &cookie));
        if let Body::Whole(bytes) = &response.body {
            behaviour.sent += bytes.len();
        }
        (response, behaviour.rate)
    };
    send(stream, response, rate)
}

fn respond(
    behaviour: &mut Behaviour,
    path: &str,
    (from, end): (Option<usize>, Option<usize>),
    authorization: &str,
) -> Response {
    let range = from.map_or("-".into(), |from| from.to_string());
    behaviour.seen.push(format!("{path} {range} {authorization}"));
    let plain = |status, body: &[u8]| Response { status, headers: vec![], body: Body::Whole(body.to_vec()) };
    if let Some(status) = behaviour.refuse {
        return plain(status, b"no");
    }
    if let Some(response) = behaviour.fault.as_ref().and_then(|fault| fault(path, from)) {
        return response;
    }
    if behaviour.modelscope && path == "/api/v1/models/test/tiny/repo/files?Revision=master&Recursive=true" {
        return plain(200, modelscope_listing(behaviour).to_string().as_bytes());
    }
    if ["main", "v1.0"].iter().any(|name| path == format!("/api/models/test/tiny/revision/{name}?blobs=true")) {
        return plain(200, listing(behaviour).to_string().as_bytes());
    }
    let prefix = match behaviour.modelscope {
        true => format!("/api/v1/models/test/tiny/repo?Revision={COMMIT}&FilePath="),
        false => format!("/test/tiny/resolve/{COMMIT}/"),
    };
    let name = path.strip_prefix(&prefix).unwrap_or_default();
    let Some(file) = behaviour.files.get(name) else { return plain(404, b"no") };
    let start = from.unwrap_or(0);
    let (size, end) = (file.len(), end.unwrap_or(usize::MAX).min(file.len()));
    let rest = file[start.min(end)..end].to_vec();
    let body = match &mut behaviour.break_off {
        Some((broken, bytes, times)) if *broken == name && *times > 0 && rest.len() > *bytes => {
            *times -= 1;
            Body::Cut(rest.len(), rest[..*bytes].to_vec())
        }
        _ => Body::Whole(rest),
    };
    match from {
        None => Response { status: 200, headers: vec![], body },
        Some(start) => {
            let range = format!("bytes {start}-{}/{size}", end.saturating_sub(1));
            // ModelScope sends parts with the wrong status.
            let status = if behaviour.modelscope { 200 } else { 206 };
            Response { status, headers: vec![("Content-Range", range)], body }
        }
    }
}

fn listing(behaviour: &Behaviour) -> Value {
    let sibling = |(name, file): (&String, &Vec<u8>)| {
        let mut git = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
        git.update(format!("blob {}\0", file.len()).as_bytes());
        git.update(file);
        let sha256 = hex(digest::digest(&digest::SHA256, file).as_ref());
        let lfs = name.ends_with(".safetensors").then(|| json!({"sha256": sha256, "size": file.len()}));
        json!({"rfilename": name, "size": file.len(), "blobId": hex(git.finish().as_ref()), "lfs": lfs})
    };
    let siblings: Vec<Value> = behaviour.files.iter().map(sibling).collect();
    let mut listing = json!({"sha": COMMIT, "siblings": siblings});
    if let Some(change) = behaviour.listing {
        change(&mut listing);
    }
    listing
}

fn modelscope_listing(behaviour: &Behaviour) -> Value {
    let file = |(name, file): (&String, &Vec<u8>)| {
        let sha256 = hex(digest::digest(&digest::SHA256, file).as_ref());
        json!({"Name": name, "Path": name, "Type": "blob", "Size": file.len(), "Sha256": sha256, "Revision": COMMIT})
    };
    let files: Vec<Value> = behaviour.files.iter().map(file).collect();
    json!({"Code": 200, "Success": true, "Message": "success", "Data": {"Files": files}})
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn send(mut stream: TcpStream, response: Response, rate: Option<usize>) -> Option<()> {
    let mut head = format!("HTTP/1.1 {} X\r\nConnection: close\r\n", response.status);
    for (name, value) in response.headers {
        head += &format!("{name}: {value}\r\n");
    }
    let (length, bytes) = match &response.body {
        Body::Whole(bytes) => (Some(bytes.len()), bytes.as_slice()),
        Body::Cut(length, bytes) | Body::Stalled(length, bytes) => (Some(*length), bytes.as_slice()),
        Body::Slow(length) => (Some(*length), [].as_slice()),
        Body::Endless => (None, [].as_slice()),
    };
    head += &length.map_or(String::new(), |length| format!("Content-Length: {length}\r\n"));
    stream.write_all((head + "\r\n").as_bytes()).ok()?;
    match rate {
        None => stream.write_all(bytes).ok()?,
        // 20 writes per second.
        Some(rate) => {
            for part in bytes.chunks((rate / 20).max(1)) {
                stream.write_all(part).ok()?;
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
    match response.body {
        Body::Stalled(..) => stream.read(&mut [0]).map(drop).ok(),
        Body::Slow(length) => {
            for _ in 0..length {
                stream.write_all(b"x").ok()?;
                std::thread::sleep(Duration::from_millis(150));
            }
            Some(())
        }
        Body::Endless => loop {
            stream.write_all(&[0; 1 << 16]).ok()?;
        },
        _ => Some(()),
    }
}
