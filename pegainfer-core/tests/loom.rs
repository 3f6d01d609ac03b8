//! The engine's threads under loom, a model checker. Each model runs once for every order in which the threads can
//! lock, send, receive and access atomics, and every value that the memory model allows them to read, with a bounded
//! number of preemptions. Handle, engine loop, demultiplexer, token streams and cancellation are those of the server.
//! loom cannot model the channels of std and tokio, so the models use channels built from its locks (src/sync).
//!
//!     RUSTFLAGS="--cfg loom" cargo test --release -p pegainfer-core --test loom --target-dir target/loom
//!
//! `LOOM_MAX_PREEMPTIONS=3` searches deeper.

#![cfg(loom)]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use loom::model::Builder;
use loom::thread;
use pegainfer_core::engine::simulation::threads;
use pegainfer_core::engine::*;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Default maximum of preemptions. Switches at waiting threads are not counted.
const PREEMPTIONS: usize = 2;
/// Maximum number of operations of one run.
const BRANCHES: usize = 20_000;

/// Counts of ended requests of an engine; not part of the model.
#[derive(Debug, Default)]
struct Ends {
    finished: AtomicUsize,
    cancelled: AtomicUsize,
    aborted: AtomicUsize,
}

/// An engine that gives each request one token per step.
struct Tokens {
    /// Tokens that are left, and whether it was admitted.
    requests: BTreeMap<RequestId, (usize, bool)>,
    in_flight: bool,
    /// The first step loses the device.
    loses_device: bool,
    /// True if only one request may run at a time.
    one_at_a_time: bool,
    ends: Arc<Ends>,
}

impl StepEngine for Tokens {
    fn limits(&self) -> EngineLimits {
        EngineLimits {
            max_model_len: 100,
            vocab_size: 10,
            block_size: 16,
            kv_blocks: 4,
            kv_cache_dtype: "bf16",
            max_num_seqs: 8,
            eos_token_ids: vec![9],
            num_speculative_tokens: None,
            image_token: None,
            unsupported: &[],
            max_loras: 0,
            hidden_size: 0,
        }
    }
    fn add(&mut self, id: RequestId, request: GenerateRequest) {
        self.requests.insert(id, (request.max_tokens, false));
    }
    fn cancel(&mut self, id: RequestId) {
        assert!(self.requests.remove(&id).is_some(), "{id:?} is cancelled after its end");
        self.ends.cancelled.fetch_add(1, Ordering::Relaxed);
    }
    fn has_work(&self) -> bool {
        self.in_flight || !self.requests.is_empty()
    }
    fn plan(&mut self) -> Option<EventBatch> {
        if self.in_flight || self.requests.is_empty() {
            return None;
        }
        assert!(!self.one_at_a_time || self.requests.len() == 1, "a request still runs although its stream is gone");
        let new = self.requests.iter_mut().filter(|(_, (_, admitted))| !admitted);
        let admit = |(id, (_, admitted)): (&RequestId, &mut (usize, bool))| {
            *admitted = true;
            (*id, TokenEvent::Admitted { cached_tokens: 0 })
        };
        Some(new.map(admit).collect())
    }
    fn launch(&mut self) -> Result<(), EngineError> {
        self.in_flight = true;
        Ok(())
    }
    fn finish(&mut self) -> Result<EventBatch, EngineError> {
        self.in_flight = false;
        if self.loses_device {
            return Err(EngineError { message: "the device is gone".into(), fatal: true });
        }
        let mut events = EventBatch::new();
        for (id, (left, _)) in self.requests.iter_mut().filter(|(_, (_, admitted))| *admitted) {
            *left -= 1;
            events.push((*id, TokenEvent::Token(TokenOut { id: 1, is_stop: false, drafted: false, logprobs: None })));
            if *left == 0 {
                events.push((*id, TokenEvent::Finished { reason: FinishReason::Length, usage: Usage::default() }));
                self.ends.finished.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.requests.retain(|_, (left, _)| *left > 0);
        Ok(events)
    }
    fn abort_all(&mut self) -> Vec<RequestId> {
        self.ends.aborted.fetch_add(self.requests.len(), Ordering::Relaxed);
        std::mem::take(&mut self.requests).into_keys().collect()
    }
    fn reset_prefix_cache(&mut self) {}
    fn stats(&self) -> EngineStats {
        EngineStats {
            running: self.requests.values().filter(|(_, admitted)| *admitted).count(),
            ..EngineStats::default()
        }
    }
}

/// An engine whose two threads run in a model.
struct World {
    handle: EngineHandle,
    threads: [thread::JoinHandle<()>; 2],
    ends: Arc<Ends>,
}

impl World {
    fn new(max_queued: usize, set: impl FnOnce(&mut Tokens)) -> Self {
        let (requests, ends) = (BTreeMap::new(), Arc::new(Ends::default()));
        let (in_flight, loses_device, one_at_a_time) = (false, false, false);
        let mut engine = Tokens { requests, in_flight, loses_device, one_at_a_time, ends: ends.clone() };
        set(&mut engine);
        let config = EngineConfig { max_queued, ..EngineConfig::default() };
        let (handle, run_engine, run_demux) = threads(engine, config);
        Self { handle, threads: [thread::spawn(run_demux), thread::spawn(run_engine)], ends }
    }

    /// Drops the last handle, which waits for the engine; returns (finished, cancelled, aborted) requests.
    fn stop(self) -> (usize, usize, usize) {
        drop(self.handle);
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(Arc::strong_count(&self.ends), 1, "the engine leaks");
        let Ends { finished, cancelled, aborted } = &*self.ends;
        let count = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        (count(finished), count(cancelled), count(aborted))
    }
}

fn request(max_tokens: usize) -> GenerateRequest {
    GenerateRequest::greedy([1], max_tokens)
}

/// Remaining events of a stream as letters: `a`dmitted, `t`oken, `f`inished, e`x`ited with a failure.
fn rest(stream: &mut TokenStream) -> String {
    let events = std::iter::from_fn(|| stream.blocking_recv());
    let letter = |event| match event {
        TokenEvent::Admitted { .. } => 'a',
        TokenEvent::Token(_) => 't',
        TokenEvent::Finished { .. } => 'f',
        TokenEvent::Failed { .. } => 'x',
        TokenEvent::Prompt(_) | TokenEvent::Vector(_) | TokenEvent::GrammarFailed { .. } => '?',
    };
    events.map(letter).collect()
}

/// Runs `model` in every order.
fn check(model: impl Fn() + Sync + Send + 'static) {
    let runs = Arc::new(Mutex::new(0));
    let counted = runs.clone();
    let mut builder = Builder::new();
    builder.preemption_bound.get_or_insert(PREEMPTIONS);
    builder.max_branches = BRANCHES;
    builder.check(move || {
        *counted.lock().unwrap() += 1;
        model();
    });
    println!("{} orders", runs.lock().unwrap());
}

#[test]
fn a_stream_has_all_events_and_the_counters_know_of_its_end() {
    check(|| {
        let world = World::new(4, |_| ());
        let mut stream = world.handle.submit(request(2)).unwrap();
        assert_eq!(rest(&mut stream), "attf");
        let stats = world.handle.stats();
        assert_eq!((stats.running, stats.waiting), (0, 0), "the memory of a request is free before its end is seen");
        assert!(world.handle.is_healthy());
        drop(stream);
        assert_eq!(world.stop(), (1, 0, 0));
    });
}

#[test]
fn a_stream_that_is_dropped_ends_its_request_once() {
    check(|| {
        let world = World::new(4, |_| ());
        let stream = world.handle.submit(request(2)).unwrap();
        drop(stream);
        let (finished, cancelled, aborted) = world.stop();
        assert_eq!((finished + cancelled, aborted), (1, 0));
    });
}

#[test]
fn a_dropped_stream_is_cancelled_before_a_later_request_runs() {
    check(|| {
        let world = World::new(4, |engine| engine.one_at_a_time = true);
        let mut stream = world.handle.submit(request(2)).unwrap();
        assert!(matches!(stream.blocking_recv(), Some(TokenEvent::Admitted { .. })));
        drop(stream);
        let mut later = world.handle.submit(request(1)).unwrap();
        assert_eq!(rest(&mut later), "atf");
        let (finished, cancelled, aborted) = world.stop();
        assert_eq!((finished + cancelled, aborted), (2, 0));
    });
}

#[test]
fn a_stream_has_all_events_beside_one_that_is_dropped() {
    check(|| {
        let world = World::new(4, |_| ());
        let dropped = world.handle.submit(request(2)).unwrap();
        let mut stream = world.handle.submit(request(2)).unwrap();
        let client = thread::spawn(move || drop(dropped));
        assert_eq!(rest(&mut stream), "attf");
        client.join().unwrap();
        let (finished, cancelled, aborted) = world.stop();
        assert_eq!((finished + cancelled, aborted), (2, 0));
    });
}

#[test]
fn the_last_handle_waits_for_open_requests() {
    check(|| {
        let world = World::new(4, |_| ());
        let mut stream = world.handle.submit(request(1)).unwrap();
        let client = thread::spawn(move || assert_eq!(rest(&mut stream), "atf"));
        assert_eq!(world.stop(), (1, 0, 0));
        client.join().unwrap();
    });
}

#[test]
fn a_full_queue_refuses_and_has_capacity_again() {
    check(|| {
        let world = World::new(1, |_| ());
        let submit = |handle: &EngineHandle| match handle.submit(request(1)) {
            Ok(mut stream) => {
                assert_eq!(rest(&mut stream), "atf");
                1
            }
            Err(SubmitError::QueueFull { queued: 1.. }) => 0,
            Err(error) => panic!("{error}"),
        };
        let handle = world.handle.clone();
        let other = thread::spawn(move || submit(&handle));
        let served = submit(&world.handle) + other.join().unwrap();
        assert!((1..=2).contains(&served), "a queue with capacity refuses");
        assert_eq!(submit(&world.handle), 1, "all requests have ended");
        assert_eq!(world.stop(), (served + 1, 0, 0));
    });
}

#[test]
fn a_lost_device_ends_every_stream_and_refuses_what_comes_later() {
    check(|| {
        let world = World::new(4, |engine| engine.loses_device = true);
        let submit = |handle: &EngineHandle| match handle.submit(request(1)) {
            // A stream that is closed without an end: its request was still on its way.
            Ok(mut stream) => {
                let events = rest(&mut stream);
                assert!(["ax", "x", ""].contains(&events.as_str()), "{events}");
                assert_eq!(handle.submit(request(1)).map(|_| ()), Err(SubmitError::EngineStopped));
                assert!(!handle.is_healthy() && handle.failure().is_some());
            }
            Err(error) => assert_eq!(error, SubmitError::EngineStopped),
        };
        let handle = world.handle.clone();
        let other = thread::spawn(move || submit(&handle));
        submit(&world.handle);
        other.join().unwrap();
        let (finished, cancelled, aborted) = world.stop();
        assert!((finished, cancelled) == (0, 0) && (1..=2).contains(&aborted));
    });
}
