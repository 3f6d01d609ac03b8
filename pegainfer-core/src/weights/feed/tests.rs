//! Tests of the feed without devices: threads that take chunks.

use super::*;
use crate::weights::Checkpoint;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

/// A bundled checkpoint.
fn tiny_dir() -> std::path::PathBuf {
    std::path::PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/dsv4-tiny-fp4fp8")
}

const LIMITS: FeedLimits = FeedLimits { chunk_bytes: 4096, chunks: 5 };

/// A feed of some tensors of the bundled checkpoint for `ranks` ranks that copy every chunk whole.
fn feed(checkpoint: &Checkpoint, ranks: usize) -> Feed<'_> {
    let mut chunks = Vec::new();
    for name in ["embed.weight", "layers.0.hc_attn_fn", "norm.weight", "layers.1.attn.wq_b.scale"] {
        let (dtype, shape) = checkpoint.describe(name).unwrap();
        let stored = checkpoint.stored(name, dtype, shape).unwrap();
        let all = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        for first in (0..all).step_by(LIMITS.chunk_bytes) {
            let bytes = LIMITS.chunk_bytes.min(all - first);
            chunks.push(Chunk { name: name.into(), stored, first, bytes, copied: ranks * bytes });
        }
    }
    Feed::new(chunks, LIMITS.chunks)
}

/// Takes all chunks, each in two parts, and checks their bytes.
fn take_all(feed: &Feed<'_>, delay: Duration) -> Result<(), WeightsError> {
    for (i, chunk) in feed.chunks.iter().enumerate() {
        let mut expected = vec![0; chunk.bytes];
        chunk.stored.read(chunk.first, &mut expected).unwrap();
        for copied in [chunk.bytes / 3, chunk.bytes - chunk.bytes / 3] {
            feed.take(i, copied, |bytes| {
                assert!(bytes == expected, "{} from byte {}", chunk.name, chunk.first);
                sleep(delay);
            })?;
        }
    }
    Ok(())
}

#[test]
fn readers_wait_for_the_slowest_rank() {
    let checkpoint = Checkpoint::open(&tiny_dir()).unwrap();
    let feed = feed(&checkpoint, 2);
    assert!(feed.chunks.len() > 40, "{} chunks", feed.chunks.len());
    let in_memory = |state: &State| {
        let held = state.held.values().filter_map(|held| held.bytes.as_ref()).map(|bytes| bytes.capacity());
        let spare = state.spare.iter().map(Vec::capacity);
        (state.held.len() + state.spare.len(), held.chain(spare).sum::<usize>())
    };
    scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| feed.read());
        }
        let fast = scope.spawn(|| take_all(&feed, Duration::ZERO).unwrap());
        // The slow rank has taken nothing: no more is read than fits.
        let start = Instant::now();
        while feed.lock().next < LIMITS.chunks {
            assert!(start.elapsed() < Duration::from_secs(60), "nothing is read");
            sleep(Duration::from_millis(1));
        }
        sleep(Duration::from_millis(50));
        assert_eq!(feed.lock().next, LIMITS.chunks);
        let slow = scope.spawn(|| take_all(&feed, Duration::from_micros(200)).unwrap());
        while !(fast.is_finished() && slow.is_finished()) {
            let (buffers, bytes) = in_memory(&feed.lock());
            let most = LIMITS.chunks * LIMITS.chunk_bytes;
            assert!(buffers <= LIMITS.chunks && bytes <= most, "{buffers}: {bytes} bytes");
            sleep(Duration::from_micros(100));
        }
    });
    assert!(feed.lock().next == feed.chunks.len() && feed.lock().held.is_empty());
}

#[test]
fn a_rank_that_fails_or_panics_frees_the_others_and_the_readers() {
    let checkpoint = Checkpoint::open(&tiny_dir()).unwrap();
    for panics in [false, true] {
        let feed = feed(&checkpoint, 3);
        let fails = |feed: &Feed<'_>| {
            let _guard = StopOnPanic(feed);
            feed.take(0, feed.chunks[0].bytes, |_| assert!(!panics, "the copy fails")).unwrap();
            WeightsError::MissingTensor { name: "mine".into() }
        };
        scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| feed.read());
            }
            let others = [(); 2].map(|()| scope.spawn(|| take_all(&feed, Duration::ZERO)));
            match catch_unwind(AssertUnwindSafe(|| fails(&feed))) {
                Ok(error) => feed.fail(error),
                Err(_) => assert!(panics),
            }
            for other in others {
                let error = other.join().unwrap().unwrap_err().to_string();
                assert!(error.contains("another rank has failed"), "{error}");
            }
        });
        let failure = feed.take_failure().map(|error| error.to_string());
        assert_eq!(failure.is_some_and(|error| error.contains("no tensor mine")), !panics);
    }
}
