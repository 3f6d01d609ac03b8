//! Property of the downloader: for any answers of a hub, the download ends, no file outside the cache is written, and
//! the files of a successful download have their listed hashes.

use pegainfer_hub::client::Timeouts;
use pegainfer_hub::{Hub, Source};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// Separator of the responses in an input.
const SEPARATOR: u8 = 0x1e;
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// Git hash of the content `{}`.
const EMPTY_OBJECT: &str = "9e26dfeeb6e641a33dae4961196235bdb965b21b";
/// SHA-256 of the content `weights`.
const WEIGHTS: &str = "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c";

struct Fixture {
    address: SocketAddr,
    /// Responses to the next requests; the next one is last.
    responses: Arc<Mutex<Vec<Vec<u8>>>>,
    root: PathBuf,
    runs: AtomicUsize,
}

fn fixture() -> &'static Fixture {
    static FIXTURE: OnceLock<Fixture> = OnceLock::new();
    FIXTURE.get_or_init(|| {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let responses: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
        let shared = responses.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let response = shared.lock().expect("responses").pop();
                // The client may leave early.
                let _ = answer(&stream, &response.unwrap_or_default());
            }
        });
        let root = std::env::temp_dir().join(format!("pegainfer-fuzz-hub-{}", std::process::id()));
        Fixture { address, responses, root, runs: AtomicUsize::new(0) }
    })
}

/// Reads a request and sends the bytes unchanged.
fn answer(mut stream: &TcpStream, response: &[u8]) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    while reader.read_line(&mut line)? > 2 {
        line.clear();
    }
    stream.write_all(response)
}

/// Checks an input: the responses to the requests, in order.
pub fn check(data: &[u8]) {
    let fixture = fixture();
    let dir = fixture.root.join(fixture.runs.fetch_add(1, Ordering::Relaxed).to_string());
    std::fs::create_dir_all(&dir).expect("a directory");
    let responses = data.split(|b| *b == SEPARATOR).rev().map(<[u8]>::to_vec).collect();
    *fixture.responses.lock().expect("responses") = responses;
    let timeouts = Timeouts {
        connect: Duration::from_secs(5),
        read: Duration::from_millis(200),
        pause: Duration::from_millis(1),
        ..Timeouts::default()
    };
    let hub = Hub {
        endpoint: format!("http://{}", fixture.address),
        token: Some("secret".into()),
        cache: dir.join("hub"),
        offline: false,
        allow_plain_http: false,
        ca_file: None,
        // The seven bytes of the weights in one segment or in two.
        segment: 4 << (data.len() % 2),
        source: Source::HuggingFace,
        timeouts,
    };
    let fetched = hub.fetch("a/b", true, &|_| Ok(()));
    for path in below(&dir) {
        assert!(is_cache_path(&path), "a foreign file: {path}");
    }
    if let Ok(snapshot) = fetched {
        assert!(snapshot.starts_with(&dir) && snapshot.join("config.json").is_file(), "{}", snapshot.display());
    }
    std::fs::remove_dir_all(&dir).expect("the directory is removed");
}

fn is_cache_path(path: &str) -> bool {
    let is_hash = |name: &str| [40, 64].contains(&name.len()) && name.bytes().all(|b| b.is_ascii_hexdigit());
    let plain = |name: &str| !name.contains("..") && !name.starts_with('/');
    match path.strip_prefix("hub/models--a--b/").and_then(|rest| rest.split_once('/')) {
        Some(("blobs", name)) => {
            let suffix = [".incomplete", ".segments", ".map"].into_iter().find_map(|end| name.strip_suffix(end));
            is_hash(suffix.unwrap_or(name))
        }
        Some(("snapshots", rest)) => rest.split_once('/').is_some_and(|(commit, name)| is_hash(commit) && plain(name)),
        Some(("refs", "main")) => true,
        _ => path
            .strip_prefix("hub/.locks/models--a--b/")
            .and_then(|name| name.strip_suffix(".lock"))
            .is_some_and(is_hash),
    }
}

/// All files and links below `dir`, as paths relative to it.
fn below(dir: &Path) -> Vec<String> {
    let (mut found, mut dirs) = (Vec::new(), vec![dir.to_path_buf()]);
    while let Some(next) = dirs.pop() {
        for entry in std::fs::read_dir(next).expect("a directory").flatten() {
            match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                true => dirs.push(entry.path()),
                false => found.extend(entry.path().strip_prefix(dir).ok().map(|path| path.display().to_string())),
            }
        }
    }
    found
}

/// Downloads that succeed, break off, are resumed or redirected.
pub fn seeds() -> Vec<Vec<u8>> {
    let ok =
        |body: &str| format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let listing = format!(
        "{{\"sha\": \"{COMMIT}\", \"siblings\": [{{\"rfilename\": \"config.json\", \"size\": 2, \"blobId\": \
         \"{EMPTY_OBJECT}\"}}, {{\"rfilename\": \"model.safetensors\", \"size\": 7, \"blobId\": \"{COMMIT}\", \"lfs\": \
         {{\"sha256\": \"{WEIGHTS}\", \"size\": 7}}}}]}}"
    );
    let part = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 7\r\n\r\nwei".to_string();
    let rest =
        "HTTP/1.1 206 Partial\r\nConnection: close\r\nContent-Range: bytes 3-6/7\r\nContent-Length: 4\r\n\r\nghts";
    let moved =
        "HTTP/1.1 302 Found\r\nConnection: close\r\nLocation: /x\r\nETag: \"../../x\"\r\nContent-Length: 0\r\n\r\n";
    let chunked = "HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n7\r\nweights\r\n0\r\n\r\n";
    let join = |parts: &[&str]| parts.join(&(SEPARATOR as char).to_string()).into_bytes();
    vec![
        join(&[&ok(&listing), &ok("{}"), &ok("weights")]),
        join(&[&ok(&listing), &ok("{}"), &part, rest]),
        join(&[moved, &ok(&listing), moved, moved, &ok("{}"), chunked]),
        join(&[&ok(&listing), &ok("{}"), "HTTP/1.1 416 X\r\nContent-Length: 0\r\n\r\n", &part, &ok("weights")]),
    ]
}
