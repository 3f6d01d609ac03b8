//! Downloads of one large file in segments: all connections are used, and whatever ends the download, no byte is lost and
//! no wrong one is kept.

use crate::support::hub::{Behaviour, Body, Hub, Response};
use crate::support::temp_dir::TempDir;
use pegainfer_hub as hub;
use pegainfer_hub::Source;
use pegainfer_hub::client::Timeouts;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

const WEIGHTS: &str = "model.safetensors";
const SIZE: usize = 1_000_000;
const SEGMENT: usize = 60_000;

fn weights() -> Vec<u8> {
    (0..SIZE as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

fn files() -> BTreeMap<String, Vec<u8>> {
    [("config.json".to_owned(), b"{}".to_vec()), (WEIGHTS.to_owned(), weights())].into()
}

/// A client with small segments, and a cache below `dir`.
fn client(hub: &Hub, dir: &Path) -> hub::Hub {
    let timeouts = Timeouts { pause: Duration::from_millis(1), ..Timeouts::default() };
    let endpoint = format!("http://{}", hub.address);
    let source = if hub.behaviour.lock().unwrap().modelscope { Source::ModelScope } else { Source::HuggingFace };
    let (token, cache, segment) = (Some("secret".into()), dir.join("hub"), SEGMENT as u64);
    hub::Hub {
        endpoint,
        source,
        token,
        cache,
        segment,
        timeouts,
        offline: false,
        ca_file: None,
        ..hub::Hub::from_env()
    }
}

fn fetch(hub: &Hub, dir: &Path) -> Result<PathBuf, String> {
    client(hub, dir).fetch("test/tiny", true, &|_| Ok(())).map_err(|error| error.to_string())
}

fn check_whole(snapshot: &Path) {
    assert!(std::fs::read(snapshot.join(WEIGHTS)).unwrap() == weights(), "other bytes");
    let blobs = snapshot.join("../../blobs").read_dir().unwrap().flatten();
    let left: Vec<_> = blobs.map(|entry| entry.path()).filter(|path| path.extension().is_some()).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Sum of the bytes that were asked for, by the ranges of the requests of the weights.
fn requested(seen: &[String]) -> usize {
    let firsts = seen.iter().filter(|line| line.contains(WEIGHTS)).map(|line| line.split(' ').nth(1).unwrap());
    firsts.map(|from| from.parse::<usize>().unwrap_or(0)).map(|from| (from / SEGMENT + 1) * SEGMENT - from).sum()
}

/// Answers requests of the weights that `choose` picks by their first byte.
fn fault(hub: &Hub, choose: impl Fn(usize) -> Option<Response> + Send + 'static) {
    hub.behaviour.lock().unwrap().fault =
        Some(Box::new(move |path, from| from.filter(|_| path.ends_with(WEIGHTS)).and_then(&choose)));
}

#[test]
fn one_large_file_uses_all_connections() {
    let took = |segment: usize| {
        let (dir, hub) = (TempDir::new(&format!("segments-rate-{segment}")), Hub::start(files()));
        // 5 s on one connection.
        hub.behaviour.lock().unwrap().rate = Some(SIZE / 5);
        let mut client = client(&hub, &dir.0);
        client.segment = segment as u64;
        let started = Instant::now();
        check_whole(&client.fetch("test/tiny", true, &|_| Ok(())).unwrap());
        started.elapsed()
    };
    let (one, eight) = (took(2 * SIZE), took(SIZE / 8));
    eprintln!("on one connection {one:.2?}, on eight {eight:.2?}");
    assert!(one > Duration::from_secs(4), "the hub is not slow: {one:?}");
    assert!(eight < one / 3, "on one connection {one:?}, on eight {eight:?}");
}

#[test]
fn an_interrupted_download_asks_only_for_what_is_missing() {
    let (dir, hub) = (TempDir::new("segments-resume"), Hub::start(files()));
    // The hub breaks each connection off after 20 kB, and then for good.
    let content = weights();
    let whole = content.clone();
    fault(&hub, move |from| {
        let end = ((from / SEGMENT + 1) * SEGMENT).min(SIZE);
        let range = format!("bytes {from}-{}/{SIZE}", end - 1);
        let body = Body::Cut(end - from, whole[from..end.min(from + 20_000)].to_vec());
        (from % SEGMENT < 40_000).then_some(Response { status: 206, headers: vec![("Content-Range", range)], body })
    });
    check_whole(&fetch(&hub, &dir.0).unwrap());
    // Each segment took three requests of 20 kB, the last one, of 40 kB, two.
    let asked = hub.seen().iter().filter(|line| line.contains(WEIGHTS)).count();
    assert_eq!(asked, 3 * (SIZE / SEGMENT) + 2, "{:?}", hub.seen());
    let firsts: std::collections::BTreeSet<String> = hub.seen().into_iter().collect();
    assert_eq!(firsts.len(), hub.seen().len(), "no range is asked for twice: {:?}", hub.seen());

    let (dir, hub) = (TempDir::new("segments-dies"), Hub::start(files()));
    let (left, whole) = (Mutex::new(5), content.clone());
    fault(&hub, move |from| {
        let mut left = left.lock().unwrap();
        if *left == 0 {
            return Some(Response { status: 404, headers: vec![], body: Body::Whole(Vec::new()) });
        }
        *left -= 1;
        let end = (from + SEGMENT).min(SIZE);
        let range = format!("bytes {from}-{}/{SIZE}", end - 1);
        Some(Response {
            status: 206,
            headers: vec![("Content-Range", range)],
            body: Body::Whole(whole[from..end].to_vec()),
        })
    });
    let error = fetch(&hub, &dir.0).unwrap_err();
    assert!(error.contains("HTTP 404; start again to resume it"), "{error}");
    let model = client(&hub, &dir.0).cached().unwrap().remove(0);
    assert!((1..=31).contains(&model.percent), "{} % of five segments of seventeen", model.percent);
    hub.behaviour.lock().unwrap().fault = None;
    let (before, present) = (hub.seen().len(), model.bytes as usize - 2);
    check_whole(&fetch(&hub, &dir.0).unwrap());
    let asked = requested(&hub.seen()[before..]) - (SIZE.div_ceil(SEGMENT) * SEGMENT - SIZE);
    assert_eq!(asked + present, SIZE, "nothing is asked for twice: {:?}", &hub.seen()[before..]);
}

#[test]
fn a_file_begun_on_one_connection_is_continued_on_several() {
    let (dir, hub) = (TempDir::new("segments-adopt"), Hub::start(files()));
    let blob = fetch(&hub, &dir.0).unwrap().join(WEIGHTS).canonicalize().unwrap();
    let (partial, before) = (blob.with_added_extension("incomplete"), hub.seen().len());
    std::fs::remove_file(&blob).unwrap();
    std::fs::write(&partial, &weights()[..500_000]).unwrap();
    check_whole(&fetch(&hub, &dir.0).unwrap());
    let firsts: Vec<String> = hub.seen()[before + 1..].to_vec();
    assert!(
        firsts.iter().all(|line| line.split(' ').nth(1).unwrap().parse::<usize>().unwrap() >= 500_000),
        "{firsts:?}"
    );
}

#[test]
fn wrong_bytes_and_hubs_without_ranges_give_the_listed_file_or_an_error() {
    let (dir, hub) = (TempDir::new("segments-wrong"), Hub::start(files()));
    let mut wrong = files();
    wrong.get_mut(WEIGHTS).unwrap()[777_777] ^= 1;
    let listed = hub.behaviour.lock().unwrap().files.clone();
    let content = wrong[WEIGHTS].clone();
    fault(&hub, move |from| {
        let end = (from + SEGMENT).min(SIZE);
        let range = format!("bytes {from}-{}/{SIZE}", end - 1);
        let body = Body::Whole(content[from..end].to_vec());
        Some(Response { status: 206, headers: vec![("Content-Range", range)], body })
    });
    let error = fetch(&hub, &dir.0).unwrap_err();
    assert!(error.contains("its hash is"), "{error}");
    *hub.behaviour.lock().unwrap() = Behaviour { files: listed, ..Behaviour::default() };
    check_whole(&fetch(&hub, &dir.0).unwrap());

    for (name, status) in [("none", 200), ("416", 416)] {
        let (dir, hub) = (TempDir::new(&format!("segments-{name}")), Hub::start(files()));
        let body = if status == 200 { weights() } else { Vec::new() };
        fault(&hub, move |_| Some(Response { status, headers: vec![], body: Body::Whole(body.clone()) }));
        check_whole(&fetch(&hub, &dir.0).unwrap());
    }
    let (dir, hub) = (TempDir::new("segments-shifted"), Hub::start(files()));
    fault(&hub, |from| {
        let range = format!("bytes {}-{}/{SIZE}", from + 1, from + SEGMENT);
        Some(Response { status: 206, headers: vec![("Content-Range", range)], body: Body::Whole(vec![0; SEGMENT]) })
    });
    let error = fetch(&hub, &dir.0).unwrap_err();
    assert!(error.contains("the hub sends the range"), "{error}");
}

#[test]
fn damaged_maps_and_contents_are_healed() {
    let (dir, hub) = (TempDir::new("segments-damaged"), Hub::start(files()));
    let blob = fetch(&hub, &dir.0).unwrap().join(WEIGHTS).canonicalize().unwrap();
    let (data, map) = (blob.with_added_extension("segments"), blob.with_added_extension("map"));
    let number = |value: usize| (value as u64).to_le_bytes();
    let head = [u64::from_le_bytes(*b"segment1").to_le_bytes(), number(SIZE), number(SEGMENT)].concat();
    let all: Vec<u8> = (0..17).flat_map(|i| number(SEGMENT.min(SIZE - i * SEGMENT))).collect();
    let all = [head, all].concat();
    let cases: [(&[u8], &[u8]); 5] = [
        (b"damaged", &weights()[..1000]),
        (&all, b""),
        // All bytes are said to be there, and are zeros.
        (&all, &[0; SIZE]),
        (&all, &weights()),
        (&all[..40], &weights()),
    ];
    for (map_bytes, content) in cases {
        std::fs::remove_file(&blob).unwrap();
        std::fs::write(&map, map_bytes).unwrap();
        std::fs::write(&data, content).unwrap();
        check_whole(&fetch(&hub, &dir.0).unwrap());
    }
}

#[test]
fn modelscope_is_a_hub() {
    let (dir, hub) = (TempDir::new("modelscope"), Hub::start(files()));
    hub.behaviour.lock().unwrap().modelscope = true;
    let snapshot = fetch(&hub, &dir.0).unwrap();
    check_whole(&snapshot);
    let seen = hub.seen();
    assert!(seen.iter().all(|line| line.ends_with(" Bearer secret m_session_id=secret")), "{seen:?}");
    assert!(seen.len() > 2 + SIZE / SEGMENT, "in segments, although ModelScope sends them with status 200: {seen:?}");
    let again = fetch(&hub, &dir.0).unwrap();
    assert_eq!((again, hub.seen().len()), (snapshot.clone(), seen.len() + 1), "only the listing is asked for");
    let mut offline = client(&hub, &dir.0);
    offline.offline = true;
    assert_eq!(offline.fetch("test/tiny", true, &|_| Ok(())).unwrap(), snapshot);

    for (path, status, expected) in [
        ("/repo/files", 404, "has no model test/tiny, or it is private and MODELSCOPE_API_TOKEN is missing"),
        ("/repo/files", 403, "set MODELSCOPE_API_TOKEN to a token that may read it"),
        ("FilePath=", 403, "/models/test/tiny, and set MODELSCOPE_API_TOKEN to a token of that account"),
    ] {
        let dir = TempDir::new("modelscope-refused");
        hub.behaviour.lock().unwrap().fault = Some(Box::new(move |asked, _| {
            let body = Body::Whole(Vec::new());
            asked.contains(path).then_some(Response { status, headers: vec![], body })
        }));
        let error = fetch(&hub, &dir.0).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}
