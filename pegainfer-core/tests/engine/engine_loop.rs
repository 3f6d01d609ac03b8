//! The engine thread over a scripted engine: refusals, cancellation, steps in flight, failing steps, panics.

use pegainfer_core::engine::*;
use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Behaviour of the next `finish`; the test sends one for each step it allows.
enum Script {
    Token,
    Fail {
        fatal: bool,
    },
    /// The step does not end before the script continues.
    Hang,
    Panic,
}

/// An engine that generates one token per step for every request, as scripted.
struct Scripted {
    script: Receiver<Script>,
    requests: BTreeMap<RequestId, (GenerateRequest, usize)>,
    /// Requests that are not admitted yet.
    new: Vec<RequestId>,
    /// Maximum number of steps in flight, and current number.
    depth: usize,
    in_flight: usize,
    /// Log of calls: `p`lan, `l`aunch, `f`inish, `a`bort_all, `r`eset_prefix_cache.
    calls: Arc<Mutex<String>>,
}

impl Scripted {
    fn call(&self, name: char) {
        self.calls.lock().unwrap().push(name);
    }
}

impl StepEngine for Scripted {
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
        self.requests.insert(id, (request, 0));
        self.new.push(id);
    }
    fn cancel(&mut self, id: RequestId) {
        self.requests.remove(&id);
    }
    fn has_work(&self) -> bool {
        self.in_flight > 0 || !self.requests.is_empty()
    }
    fn plan(&mut self) -> Option<EventBatch> {
        if self.in_flight == self.depth || self.requests.is_empty() {
            return None;
        }
        self.call('p');
        let new = self.new.drain(..).filter(|id| self.requests.contains_key(id));
        Some(new.map(|id| (id, TokenEvent::Admitted { cached_tokens: 0 })).collect())
    }
    fn launch(&mut self) -> Result<(), EngineError> {
        self.call('l');
        self.in_flight += 1;
        Ok(())
    }
    fn finish(&mut self) -> Result<EventBatch, EngineError> {
        assert!(self.in_flight > 0, "nothing to finish");
        match self.script.recv_timeout(Duration::from_millis(50)) {
            // No script for this step: return at once, so that cancellations are noticed.
            Err(_) if !self.requests.is_empty() => return Ok(vec![]),
            // A surplus step, after its requests have ended, needs no script.
            Ok(Script::Token) | Err(_) => {}
            Ok(Script::Fail { fatal }) => {
                return Err(EngineError { message: "linear: the device is gone".into(), fatal });
            }
            Ok(Script::Hang) => drop(self.script.recv()),
            Ok(Script::Panic) => panic!("scripted"),
        }
        self.call('f');
        self.in_flight -= 1;
        Ok(self.tokens())
    }
    fn abort_all(&mut self) -> Vec<RequestId> {
        self.call('a');
        self.in_flight = 0;
        std::mem::take(&mut self.requests).into_keys().collect()
    }
    fn reset_prefix_cache(&mut self) {
        self.call('r');
    }
    fn stats(&self) -> EngineStats {
        EngineStats { running: self.requests.len(), ..EngineStats::default() }
    }
}

impl Scripted {
    fn tokens(&mut self) -> EventBatch {
        let mut events = EventBatch::new();
        for (id, (request, done)) in &mut self.requests {
            *done += 1;
            events.push((*id, TokenEvent::Token(TokenOut { id: 1, is_stop: false, drafted: false, logprobs: None })));
            if *done == request.max_tokens {
                let usage = Usage { prompt_tokens: request.prompt.len(), completion_tokens: *done, cached_tokens: 0 };
                events.push((*id, TokenEvent::Finished { reason: FinishReason::Length, usage }));
            }
        }
        self.requests.retain(|_, (request, done)| *done < request.max_tokens);
        events
    }
}

/// Deadline of a step in these tests.
const STEP_DEADLINE: Duration = Duration::from_millis(500);

fn start(max_queued: usize) -> (EngineHandle, SyncSender<Script>) {
    let (handle, script, _) = start_deep(max_queued, 1);
    (handle, script)
}

/// An engine that lets `depth` steps be in flight, and its calls.
fn start_deep(max_queued: usize, depth: usize) -> (EngineHandle, SyncSender<Script>, Arc<Mutex<String>>) {
    let (sender, script) = sync_channel(1000);
    let calls = Arc::new(Mutex::new(String::new()));
    let engine = Scripted { script, requests: BTreeMap::new(), new: vec![], depth, in_flight: 0, calls: calls.clone() };
    let config = EngineConfig { max_queued, step_deadline: STEP_DEADLINE, ..EngineConfig::default() };
    (EngineHandle::spawn(engine, config).unwrap(), sender, calls)
}

fn request(prompt: usize, max_tokens: usize) -> GenerateRequest {
    GenerateRequest::greedy(vec![1; prompt], max_tokens)
}

fn rest(stream: &mut TokenStream) -> Vec<TokenEvent> {
    let events = std::iter::from_fn(|| stream.blocking_recv());
    events.filter(|e| !matches!(e, TokenEvent::Admitted { .. })).collect()
}

/// Polls a future until it is ready; nothing here needs a runtime.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return value;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "timed out waiting until {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn events_come_in_order_and_end_once() {
    let (handle, script) = start(8);
    let mut stream = handle.submit(request(3, 2)).unwrap();
    script.send(Script::Token).unwrap();
    script.send(Script::Token).unwrap();
    assert!(matches!(stream.blocking_recv(), Some(TokenEvent::Admitted { .. })));
    let events = rest(&mut stream);
    assert_eq!(events.len(), 3);
    assert!(matches!(&events[2], TokenEvent::Finished { usage, .. } if usage.completion_tokens == 2));
    wait_until("idle", || handle.stats().waiting + handle.stats().running == 0);
}

#[test]
fn impossible_requests_are_refused_at_submit() {
    let (handle, _script) = start(8);
    let refusal = |r| handle.submit(r).unwrap_err();
    assert_eq!(refusal(request(0, 1)), SubmitError::EmptyPrompt);
    assert_eq!(refusal(request(1, 0)), SubmitError::NothingToGenerate);
    let logprobs = GenerateRequest { logprobs: Some(21), ..request(1, 1) };
    assert_eq!(refusal(logprobs), SubmitError::TooManyLogprobs { asked: 21 });
    assert!(matches!(refusal(request(100, 1)), SubmitError::PromptTooLong { .. }));
    assert!(matches!(refusal(request(50, 51)), SubmitError::ContextExceeded { .. }));
    assert!(matches!(refusal(request(50, usize::MAX)), SubmitError::ContextExceeded { .. }));
    assert!(matches!(refusal(request(60, 10)), SubmitError::NeverFits { needed: 69, capacity: 64 }));
    let invalid = GenerateRequest { prompt: vec![1, 10].into(), ..request(1, 1) };
    assert!(matches!(refusal(invalid), SubmitError::InvalidToken { id: 10, .. }));
    assert!(handle.submit(request(50, 15)).is_ok());
}

#[test]
fn a_full_queue_refuses_and_a_dropped_stream_makes_room() {
    let (handle, _script) = start(2);
    let first = handle.submit(request(1, 5)).unwrap();
    let _second = handle.submit(request(1, 5)).unwrap();
    assert_eq!(handle.submit(request(1, 5)).unwrap_err(), SubmitError::QueueFull { queued: 2 });
    drop(first);
    wait_until("the dropped request is forgotten", || handle.stats().running == 1);
    handle.submit(request(1, 5)).unwrap();
}

#[test]
fn a_deadline_cancels_a_request_that_nobody_receives() {
    let (handle, _script) = start(8);
    let mut late = handle.submit(request(1, 5)).unwrap();
    let other = handle.submit(request(1, 5)).unwrap();
    wait_until("both run", || handle.stats().running == 2);
    late.cancel_at(Instant::now() + Duration::from_millis(20));
    wait_until("the engine has forgotten it", || handle.stats().running == 1);
    assert_eq!(rest(&mut late), [], "no event tells of it");
    assert_eq!(other.id(), RequestId(1));
}

#[test]
fn events_carry_the_time_they_were_emitted() {
    let (handle, script) = start(8);
    let mut stream = handle.submit(request(1, 2)).unwrap();
    let submitted = stream.at();
    script.send(Script::Token).unwrap();
    script.send(Script::Token).unwrap();
    wait_until("it is over", || handle.stats().running + handle.stats().waiting == 0);
    let over = Instant::now();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(rest(&mut stream).len(), 3);
    assert!(stream.at() > submitted && stream.at() < over + Duration::from_millis(10), "not when they were received");
}

#[test]
fn the_engine_thread_resets_the_prefix_cache_idle_or_not() {
    let (handle, script, calls) = start_deep(8, 1);
    let reset = || block_on(handle.reset_prefix_cache());
    assert_eq!(reset(), Ok(()));
    assert_eq!(calls.lock().unwrap().as_str(), "r");
    let mut stream = handle.submit(request(1, 1)).unwrap();
    wait_until("a step is in flight", || calls.lock().unwrap().as_str() == "rpl");
    assert_eq!(reset(), Ok(()));
    script.send(Script::Token).unwrap();
    assert_eq!(rest(&mut stream).len(), 2);
    script.send(Script::Panic).unwrap();
    let mut last = handle.submit(request(1, 1)).unwrap();
    assert_eq!(rest(&mut last), []);
    wait_until("unhealthy", || !handle.is_healthy());
    assert_eq!(reset(), Err(SubmitError::EngineStopped));
}

#[test]
fn a_failed_step_fails_its_requests_and_the_engine_goes_on() {
    let (handle, script) = start(8);
    let mut stream = handle.submit(request(1, 5)).unwrap();
    script.send(Script::Fail { fatal: false }).unwrap();
    let events = rest(&mut stream);
    assert_eq!(events, [TokenEvent::Failed { error: "linear: the device is gone".into() }]);
    let mut stream = handle.submit(request(1, 1)).unwrap();
    script.send(Script::Token).unwrap();
    assert_eq!(rest(&mut stream).len(), 2);
    assert!(handle.is_healthy());
}

#[test]
fn steps_overlap_and_nothing_is_left_in_flight() {
    let (handle, script, calls) = start_deep(8, 2);
    let mut stream = handle.submit(request(1, 3)).unwrap();
    for _ in 0..3 {
        script.send(Script::Token).unwrap();
    }
    assert_eq!(rest(&mut stream).len(), 4);
    // The step launched before the last token was known must be finished as well.
    wait_until("the last step is finished", || calls.lock().unwrap().as_str() == "plplfplfplff");
}

#[test]
fn a_failure_drops_every_step_in_flight() {
    let (handle, script, calls) = start_deep(8, 2);
    let mut stream = handle.submit(request(1, 5)).unwrap();
    script.send(Script::Fail { fatal: false }).unwrap();
    assert_eq!(rest(&mut stream).len(), 1);
    assert_eq!(calls.lock().unwrap().as_str(), "plpla");
    let mut stream = handle.submit(request(1, 1)).unwrap();
    script.send(Script::Token).unwrap();
    assert_eq!(rest(&mut stream).len(), 2);
}

#[test]
fn a_fatal_failure_stops_the_engine_and_health_says_so() {
    let (handle, script, _) = start_deep(8, 2);
    let mut streams = [handle.submit(request(1, 5)).unwrap(), handle.submit(request(1, 5)).unwrap()];
    wait_until("both run", || handle.stats().running == 2);
    script.send(Script::Fail { fatal: true }).unwrap();
    for stream in &mut streams {
        assert_eq!(rest(stream), [TokenEvent::Failed { error: "linear: the device is gone".into() }]);
        assert!(!handle.is_healthy(), "whoever saw the failure sees the state");
    }
    assert_eq!(handle.submit(request(1, 5)).unwrap_err(), SubmitError::EngineStopped);
}

#[test]
fn a_step_past_its_deadline_is_unhealthy_until_it_ends() {
    let (handle, script) = start(8);
    std::thread::sleep(2 * STEP_DEADLINE);
    assert!(handle.is_healthy(), "an idle engine is not stuck");
    script.send(Script::Hang).unwrap();
    let submitted = Instant::now();
    let mut stream = handle.submit(request(1, 2)).unwrap();
    wait_until("unhealthy", || !handle.is_healthy());
    let noticed = submitted.elapsed();
    assert!(noticed >= STEP_DEADLINE && noticed < STEP_DEADLINE + Duration::from_secs(1), "{noticed:?}");
    script.send(Script::Token).unwrap();
    assert!(stream.blocking_recv().is_some() && stream.blocking_recv().is_some());
    assert!(handle.is_healthy(), "it goes on");
    script.send(Script::Token).unwrap();
    assert_eq!(rest(&mut stream).len(), 2);
}

#[test]
fn a_panic_closes_every_stream_and_health_says_so() {
    let (handle, script) = start(8);
    let mut stream = handle.submit(request(1, 5)).unwrap();
    assert!(handle.is_healthy());
    script.send(Script::Panic).unwrap();
    assert_eq!(rest(&mut stream), [], "the stream ends without a Finished");
    wait_until("unhealthy", || !handle.is_healthy());
    assert_eq!(handle.submit(request(1, 5)).unwrap_err(), SubmitError::EngineStopped);
}

#[test]
fn the_end_of_an_engine_can_be_waited_for_wherever_its_last_handle_is() {
    let (handle, script, calls) = start_deep(8, 1);
    let mut stream = handle.submit(request(1, 1)).unwrap();
    script.send(Script::Token).unwrap();
    assert!(rest(&mut stream).len() > 1);
    let end = handle.end();
    let elsewhere = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        drop(handle);
    });
    end.wait();
    assert_eq!(Arc::strong_count(&calls), 1, "the engine is dropped");
    elsewhere.join().unwrap();
}
