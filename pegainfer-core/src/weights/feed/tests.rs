//! Tests of the feed without devices: threads that take chunks.

use super::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

/// A bundled checkpoint.
fn tiny_dir() -> std::path::PathBuf {
    std::path::PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/dsv4-tiny-fp4fp8")
}

const LIMITS: FeedLimits = FeedLimits { chunk_bytes: 4096, chunks: 5 };

/// Some tensors of the bundled checkpoint: rows of 512 bytes, rows larger than a chunk, and vectors.
fn specs(checkpoint: &Checkpoint) -> Vec<TensorSpec> {
    let spec = |name: &str| {
        let (dtype, shape) = checkpoint.describe(name).unwrap();
        TensorSpec { name: name.to_owned(), dtype, shape: shape.to_vec() }
    };
    ["embed.weight", "layers.0.hc_attn_fn", "norm.weight", "layers.1.attn.wq_b.scale"].map(spec).to_vec()
}

/// Takes all tensors and checks their bytes.
fn take_all(feed: &Feed<'_>, delay: Duration) -> Result<(), WeightsError> {
    let mut cursor = Cursor::new(feed);
    for (spec, stored) in &feed.tensors {
        let mut next = 0;
        cursor.next(spec, |rows, bytes| {
            let mut expected = vec![0; bytes.len()];
            stored.read(rows.start * spec.row_bytes(), &mut expected).unwrap();
            assert!(rows.start == next && bytes == expected, "{}: rows {rows:?}", spec.name);
            next = rows.end;
            sleep(delay);
            Ok(())
        })?;
        assert_eq!(next, spec.shape[0]);
    }
    Ok(())
}

#[test]
fn readers_wait_for_the_slowest_rank() {
    let checkpoint = Checkpoint::open(&tiny_dir()).unwrap();
    let feed = Feed::new(&checkpoint, specs(&checkpoint), 2, LIMITS).unwrap();
    let most = feed.chunks.iter().map(|chunk| chunk.rows.len() * feed.tensors[chunk.tensor].0.row_bytes()).max();
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
            assert!(buffers <= LIMITS.chunks && bytes <= LIMITS.chunks * most.unwrap(), "{buffers}: {bytes} bytes");
            sleep(Duration::from_micros(100));
        }
    });
    let expected: usize = feed.tensors.iter().map(|(spec, _)| spec.shape[0] * spec.row_bytes()).sum();
    assert_eq!(feed.bytes_read(), expected as u64);
}

#[test]
fn a_rank_that_fails_or_panics_frees_the_others_and_the_readers() {
    let checkpoint = Checkpoint::open(&tiny_dir()).unwrap();
    for panics in [false, true] {
        let feed = Feed::new(&checkpoint, specs(&checkpoint), 3, LIMITS).unwrap();
        let fails = |feed: &Feed<'_>| {
            let _guard = StopOnPanic(feed);
            let mut cursor = Cursor::new(feed);
            cursor.next(&feed.tensors[0].0, |rows, _| {
                assert!(!panics || rows.start == 0, "out of order");
                if rows.start > 0 { Err(WeightsError::MissingTensor { name: "mine".into() }) } else { Ok(()) }
            })
        };
        scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| feed.read());
            }
            let others = [(); 2].map(|()| scope.spawn(|| take_all(&feed, Duration::ZERO)));
            match catch_unwind(AssertUnwindSafe(|| fails(&feed))) {
                Ok(result) => feed.fail(result.unwrap_err()),
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
