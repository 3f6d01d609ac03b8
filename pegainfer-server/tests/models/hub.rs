//! Downloads from hostile, broken or slow hubs: no file outside the cache, and a good hub heals the cache.

use crate::support::hub::{Behaviour, Body, COMMIT, Fault, Hub, Response};
use crate::support::temp_dir::TempDir;
use pegainfer_hub as hub;
use pegainfer_hub::Source;
use pegainfer_hub::client::Timeouts;
use pegainfer_hub::pace::MinRate;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A change of the hub's listing.
type Change = fn(&mut Value);

const WEIGHTS: &str = "model.safetensors";

fn files() -> BTreeMap<String, Vec<u8>> {
    let weights = (0..300_000u32).map(|i| (i * 7 % 251) as u8).collect();
    let text = |name: &str| (name.to_string(), format!("{{\"file\": \"{name}\"}}").into_bytes());
    [text("config.json"), text("tokenizer.json"), text("encoding/encoding_dsv4.py"), (WEIGHTS.into(), weights)].into()
}

/// A client of `hub` with a cache below `dir`.
fn client(hub: &Hub, dir: &Path) -> hub::Hub {
    let timeouts = Timeouts {
        connect: Duration::from_secs(5),
        read: Duration::from_millis(300),
        min_rate: MinRate { bytes: 1000, window: Duration::from_millis(200) },
        pause: Duration::from_millis(1),
    };
    let endpoint = format!("http://{}", hub.address);
    let token = Some("secret".to_string());
    hub::Hub {
        endpoint,
        token,
        cache: dir.join("hub"),
        offline: false,
        allow_plain_http: false,
        ca_file: None,
        segment: 64 << 20,
        source: Source::HuggingFace,
        timeouts,
    }
}

/// All files and links below `dir`, as paths relative to it.
fn below(dir: &Path) -> Vec<String> {
    let (mut found, mut dirs) = (Vec::new(), vec![dir.to_path_buf()]);
    while let Some(next) = dirs.pop() {
        for entry in std::fs::read_dir(next).unwrap().map(Result::unwrap) {
            match entry.file_type().unwrap().is_dir() {
                true => dirs.push(entry.path()),
                false => found.push(entry.path().strip_prefix(dir).unwrap().to_str().unwrap().to_string()),
            }
        }
    }
    found
}

/// Checks that every file belongs to the cache's layout, and is not larger than listed.
fn check_no_foreign_file(dir: &Path) {
    let is_hex = |text: &str| [40, 64].contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
    for path in below(dir) {
        let repo = path.strip_prefix("hub/models--test--tiny/");
        let known = match repo.and_then(|rest| rest.split_once('/')) {
            Some(("blobs", name)) => {
                let suffix = [".incomplete", ".segments", ".map"].into_iter().find_map(|end| name.strip_suffix(end));
                is_hex(suffix.unwrap_or(name))
            }
            Some(("snapshots", rest)) => {
                rest.strip_prefix(COMMIT).is_some_and(|name| files().contains_key(&name[1..]) || name.contains("index"))
            }
            Some(("refs", name)) => name == "main",
            _ => path.strip_prefix("hub/.locks/models--test--tiny/").is_some_and(|lock| lock.ends_with(".lock")),
        };
        assert!(known, "a foreign file: {path}");
        let size = dir.join(&path).metadata().unwrap().len();
        assert!(size <= 300_000, "{path} has {size} bytes");
    }
}

fn check_complete(snapshot: &Path) {
    for (name, content) in files() {
        assert_eq!(std::fs::read(snapshot.join(&name)).unwrap(), content, "{name}");
    }
}

/// Downloads first from a hub changed by `attack`, then from the good one, which must succeed. Returns the first
/// outcome.
fn attacked(name: &str, attack: impl FnOnce(&mut Behaviour)) -> Result<PathBuf, String> {
    let (dir, hub) = (TempDir::new(&format!("hub-{name}")), Hub::start(files()));
    attack(&mut hub.behaviour.lock().unwrap());
    let outcome = client(&hub, &dir.0).fetch("test/tiny", true, &|_| Ok(())).map_err(|error| error.to_string());
    check_no_foreign_file(&dir.0);
    if let Ok(snapshot) = &outcome {
        check_complete(snapshot);
    }
    *hub.behaviour.lock().unwrap() = Behaviour { files: files(), ..Behaviour::default() };
    let healed = client(&hub, &dir.0).fetch("test/tiny", true, &|_| Ok(()));
    check_complete(&healed.unwrap_or_else(|error| panic!("{name} is not healed: {error}")));
    check_no_foreign_file(&dir.0);
    outcome
}

/// Responds to downloads of the weights.
fn weights(response: impl Fn(Option<usize>) -> Option<Response> + Send + 'static) -> Option<Fault> {
    Some(Box::new(move |path, from| path.ends_with(WEIGHTS).then(|| response(from)).flatten()))
}

fn response(status: u16, headers: &[(&'static str, &str)], body: Body) -> Option<Response> {
    let headers = headers.iter().map(|(name, value)| (*name, value.to_string())).collect();
    Some(Response { status, headers, body })
}

fn whole() -> Vec<u8> {
    files().remove(WEIGHTS).unwrap()
}

#[test]
fn names_of_a_hostile_hub_become_no_paths() {
    let foreign = |name: &str| format!("{}/foreign", std::env::temp_dir().join(name).display());
    for (i, etag) in [foreign("a"), "\"../../../../foreign\"".into(), "\"..\"".into()].into_iter().enumerate() {
        let headers = attacked(&format!("headers-{i}"), |hub| {
            hub.fault = weights(move |_| {
                let linked = ("X-Linked-Etag", etag.as_str());
                let commit = ("X-Repo-Commit", etag.as_str());
                response(200, &[("ETag", etag.as_str()), linked, commit], Body::Whole(whole()))
            });
        });
        assert!(headers.is_ok(), "headers name nothing: {headers:?}");
    }
    let changes: [(Change, &str); 6] = [
        (|listing| listing["sha"] = json!("../../../../x"), "commit id is not 40 hexadecimal digits"),
        (|listing| listing["sha"] = json!("/tmp/x"), "commit id is not 40 hexadecimal digits"),
        (|listing| listing["siblings"][0]["blobId"] = json!("../../x"), "it cannot be verified"),
        (|listing| listing["siblings"][2]["lfs"]["sha256"] = json!("/tmp/foreign"), "it cannot be verified"),
        (|listing| listing["siblings"][0]["size"] = json!(1u64 << 40), "are taken"),
        (|listing| listing["siblings"][0]["size"] = Value::Null, "it cannot be verified"),
    ];
    for (i, (change, expected)) in changes.into_iter().enumerate() {
        let error = attacked(&format!("listing-{i}"), |hub| hub.listing = Some(change)).unwrap_err();
        assert!(error.contains(expected), "{i}: {error}");
    }
    for (i, shard) in ["../../../x", "/tmp/x", ".x", "a/b", "a\u{0}b"].into_iter().enumerate() {
        let error = attacked(&format!("index-{i}"), |hub| {
            let index = json!({"weight_map": {"w": shard}}).to_string().into_bytes();
            hub.files.insert("model.safetensors.index.json".into(), index);
        });
        assert!(error.unwrap_err().contains("which is not a file name"), "{shard}");
    }
}

#[test]
fn bodies_that_are_not_the_listed_file_are_dropped() {
    let mut wrong = whole();
    wrong[150_000] ^= 1;
    const GZIP: &[(&str, &str)] = &[("Content-Encoding", "gzip")];
    for (name, body, headers, expected) in [
        ("corrupt", Body::Whole(wrong), &[][..], "its hash is"),
        ("short", Body::Whole(whole()[..200_000].to_vec()), &[], "does not send the"),
        ("long", Body::Whole([whole(), whole()].concat()), &[], "does not send the"),
        ("broken", Body::Cut(300_000, whole()[..100].to_vec()), &[], "start again to resume"),
        ("endless", Body::Endless, &[], "more than the 300000 bytes"),
        ("gzip", Body::Whole(whole()), GZIP, "compressed body"),
    ] {
        let body = std::sync::Mutex::new(Some(body));
        let error = attacked(name, |hub| {
            hub.fault = weights(move |_| match body.lock().unwrap().take() {
                Some(body) => response(200, headers, body),
                None => response(503, &[], Body::Whole(Vec::new())),
            });
        });
        let error = error.unwrap_err();
        assert!(error.contains(expected), "{name}: {error}");
    }
}

#[test]
fn a_stalled_hub_ends_the_download() {
    let started = Instant::now();
    let error = attacked("stall", |hub| {
        hub.fault = weights(|_| response(200, &[], Body::Stalled(300_000, whole()[..1000].to_vec())));
    });
    assert!(error.unwrap_err().contains("start again to resume"));
    let error = attacked("stalled-listing", |hub| {
        hub.fault = Some(Box::new(|_, _| response(200, &[], Body::Stalled(9, Vec::new()))));
    });
    assert!(error.unwrap_err().contains("cannot be reached"));
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}

/// The listing, a small file and the weights each trickle in without end.
#[test]
fn a_hub_at_a_byte_now_and_then_ends_the_download() {
    let paths = ["/api/models", "config.json", WEIGHTS];
    let outcomes = std::thread::scope(|scope| {
        let attempts = paths.map(|part| {
            scope.spawn(move || {
                let started = Instant::now();
                let outcome = attacked(&format!("slow-{}", part.trim_matches('/').replace('/', "-")), |hub| {
                    hub.fault = Some(Box::new(move |path, from| {
                        let size = match part {
                            WEIGHTS => 300_000 - from.unwrap_or(0),
                            _ => 23 - from.unwrap_or(0),
                        };
                        let range = from.map(|from| format!("bytes {from}-{}/{}", from + size - 1, from + size));
                        let headers: Vec<_> = range.iter().map(|range| ("Content-Range", range.as_str())).collect();
                        let status = if from.is_some() { 206 } else { 200 };
                        path.contains(part).then(|| response(status, &headers, Body::Slow(size)).unwrap())
                    }));
                });
                (outcome, started.elapsed())
            })
        });
        attempts.map(|attempt| attempt.join().unwrap())
    });
    for (path, (outcome, took)) in paths.iter().zip(outcomes) {
        let error = outcome.unwrap_err();
        assert!(error.contains("the hub sends too slowly: "), "{path}: {error}");
        assert!(took < Duration::from_secs(20), "{path}: {took:?}");
    }
}

#[test]
fn a_hub_that_cannot_resume_is_asked_for_the_whole_file() {
    for (name, respond) in [
        ("whole", (|_| response(200, &[], Body::Whole(whole()))) as fn(Option<usize>) -> Option<Response>),
        ("416", |_| response(416, &[], Body::Whole(Vec::new()))),
        ("other-bytes", |from| {
            let range = format!("bytes {}-299999/300000", from?);
            response(206, &[("Content-Range", &range)], Body::Whole(vec![1; 300_000 - from?]))
        }),
    ] {
        let outcome = attacked(name, |hub| {
            hub.break_off = Some((WEIGHTS.into(), 100_000, 1));
            hub.fault = weights(move |from| from.and_then(|_| respond(from)));
        });
        assert!(outcome.is_ok(), "{name}: {outcome:?}");
    }
    for (i, range) in
        ["bytes 0-299999/300000", "bytes 100000-299999/300001", "bytes */300000", ""].into_iter().enumerate()
    {
        let error = attacked(&format!("range-{i}"), |hub| {
            hub.break_off = Some((WEIGHTS.into(), 100_000, 1));
            hub.fault = weights(move |from| {
                from.and_then(|from| response(206, &[("Content-Range", range)], Body::Whole(whole()[from..].to_vec())))
            });
        });
        assert!(error.unwrap_err().contains("the hub sends the range"), "{range}");
    }
}

#[test]
fn redirects_are_few_and_carry_no_token_to_other_hosts() {
    let dir = TempDir::new("hub-redirect");
    let (hub, other) = (Hub::start(files()), Hub::start(files()));
    let elsewhere = format!("http://localhost:{}", other.address.port());
    hub.behaviour.lock().unwrap().fault = Some(Box::new(move |path, _| {
        let (elsewhere, moved) = (format!("{elsewhere}{path}"), path.strip_suffix(WEIGHTS)?);
        response(302, &[("Location", &elsewhere)], Body::Whole(moved.into()))
    }));
    check_complete(&client(&hub, &dir.0).fetch("test/tiny", true, &|_| Ok(())).unwrap());
    assert!(hub.seen().iter().all(|line| line.ends_with(" Bearer secret")), "{:?}", hub.seen());
    let seen = other.seen();
    assert!(seen.len() == 1 && seen[0].contains(WEIGHTS) && !seen[0].contains("secret"), "{seen:?}");

    for (i, (location, expected)) in [
        (Some("again/model.safetensors"), "redirects more than 8 times"),
        (Some("/model.safetensors"), "redirects more than 8 times"),
        (Some("http://hub.example/x"), "plain http"),
        (Some("ftp://hub.example/x"), "neither with https:// nor"),
        (Some("http://["), "an invalid URL"),
        (None, "without an address"),
    ]
    .into_iter()
    .enumerate()
    {
        let (hub, dir) = (Hub::start(files()), TempDir::new(&format!("hub-redirect-{i}")));
        hub.behaviour.lock().unwrap().fault = weights(move |_| {
            let headers: Vec<_> = location.iter().map(|location| ("Location", *location)).collect();
            response(307, &headers, Body::Whole(Vec::new()))
        });
        let error = client(&hub, &dir.0).fetch("test/tiny", true, &|_| Ok(())).unwrap_err().to_string();
        assert!(error.contains(expected), "{location:?}: {error}");
        assert!(hub.seen().len() < 20, "{:?}", hub.seen());
        check_no_foreign_file(&dir.0);
    }
}

#[test]
fn leftovers_of_any_program_are_healed() {
    let (dir, hub) = (TempDir::new("hub-left"), Hub::start(files()));
    let blob =
        client(&hub, &dir.0).fetch("test/tiny", true, &|_| Ok(())).unwrap().join(WEIGHTS).canonicalize().unwrap();
    let partial = blob.with_added_extension("incomplete");
    // A blob of a wrong size, and partial files: wrong bytes, too many bytes, all bytes.
    let leftovers: [(Option<&[u8]>, &[u8]); 4] =
        [(Some(b"short"), &[]), (None, &[9; 1000]), (None, &[0; 300_001]), (None, &whole())];
    for (left, part) in leftovers {
        std::fs::remove_file(&blob).unwrap();
        std::fs::write(&partial, part).unwrap();
        if let Some(left) = left {
            std::fs::write(&blob, left).unwrap();
        }
        check_complete(&client(&hub, &dir.0).fetch("test/tiny", true, &|_| Ok(())).unwrap());
        assert!(!partial.exists());
    }
}

#[test]
fn the_layout_is_that_of_hugging_face() {
    let (dir, hub) = (TempDir::new("hub-layout"), Hub::start(files()));
    let mut client = client(&hub, &dir.0);
    let snapshot = client.fetch("test/tiny", true, &|_| Ok(())).unwrap();
    let repo = dir.0.join("hub/models--test--tiny");
    assert_eq!(snapshot, repo.join("snapshots").join(COMMIT));
    assert_eq!(std::fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    let config = std::fs::read_link(snapshot.join("config.json")).unwrap();
    assert!(config.starts_with("../../blobs") && config.file_name().unwrap().len() == 40, "git's SHA-1: {config:?}");
    let weights = std::fs::read_link(snapshot.join(WEIGHTS)).unwrap();
    assert!(weights.starts_with("../../blobs") && weights.file_name().unwrap().len() == 64, "SHA-256: {weights:?}");
    assert!(std::fs::read_link(snapshot.join("encoding/encoding_dsv4.py")).unwrap().starts_with("../../../blobs"));

    let before = hub.seen().len();
    client.fetch("test/tiny", true, &|_| Ok(())).unwrap();
    assert_eq!(hub.seen().len(), before + 1, "only the listing is asked for");
    client.offline = true;
    check_complete(&client.fetch("test/tiny", true, &|_| Ok(())).unwrap());
    std::fs::remove_file(snapshot.join(WEIGHTS)).unwrap();
    let error = client.fetch("test/tiny", true, &|_| Ok(())).unwrap_err().to_string();
    assert!(error.contains("HF_HUB_OFFLINE is set and"), "{error}");
    assert_eq!(hub.seen().len(), before + 1, "offline, nothing is asked for");
}

#[test]
fn processes_that_start_together_download_once() {
    let (dir, hub) = (TempDir::new("hub-together"), Hub::start(files()));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| check_complete(&client(&hub, &dir.0).fetch("test/tiny", true, &|_| Ok(())).unwrap()));
        }
    });
    let downloads = hub.seen().iter().filter(|line| line.contains(WEIGHTS)).count();
    assert_eq!(downloads, 1, "{:?}", hub.seen());
    check_no_foreign_file(&dir.0);
}
