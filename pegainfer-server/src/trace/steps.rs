//! Engine steps in Chrome's trace format, for <https://ui.perfetto.dev>: the newest steps, and files of slow steps.

use pegainfer_core::ledger::{Capture, Cause, RowDetail, StepDetail, StepLog, StepTime};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Rows of a trace, and their names.
const ROWS: [(u32, &str); 3] = [(STEPS, "steps"), (OPS, "ops"), (IDLE, "no step runs")];
const STEPS: u32 = 1;
const OPS: u32 = 2;
const IDLE: u32 = 3;
/// Minimum pause between two steps that is shown.
const MIN_PAUSE: Duration = Duration::from_micros(20);
/// Maximum number of captures waiting to be written. More are dropped with a log line.
const MAX_WAITING: usize = 4;
/// Maximum number of slow-step files per server.
const MAX_FILES: usize = 100;

/// The steps as a trace. Their times count from `start`, the start of the engine. Traces of requests use the same
/// clock.
pub fn events(steps: &[StepTime], start: Instant) -> Vec<Value> {
    step_events(steps, unix_us(start))
}

/// Like [`events`], with the start in microseconds of Unix time. All events of a trace must use the same value: the two
/// clocks are read one after the other, so two conversions of one instant can differ by a microsecond.
fn step_events(steps: &[StepTime], origin: f64) -> Vec<Value> {
    let mut events: Vec<Value> = ROWS.iter().map(|(row, name)| named(*row, name)).collect();
    let mut ended: Option<Duration> = None;
    for step in steps {
        let StepTime { number, end, load, took, predicted_us } = step;
        let began = end.saturating_sub(*took);
        if let Some(pause) = ended.and_then(|ended| began.checked_sub(ended)).filter(|pause| *pause >= MIN_PAUSE) {
            events.push(span(IDLE, "no step runs", (origin, began.saturating_sub(pause), pause), Value::Null));
        }
        let ratio = predicted_us.map(|us| took.as_secs_f64() * 1e6 / us);
        let args = json!({"step": number, "load": load, "predicted_us": predicted_us, "measured/predicted": ratio});
        events.push(span(STEPS, load.kind().name(), (origin, began, *took), args));
        ended = Some(*end);
    }
    events
}

/// A slow step, its neighbours, and the known ops and requests in them.
pub fn capture(capture: &Capture) -> Value {
    let Capture { anomaly, steps, details, start } = capture;
    let origin = unix_us(*start);
    let mut events = step_events(steps, origin);
    for detail in details {
        let Some(step) = steps.iter().find(|step| step.number == detail.number) else { continue };
        let StepDetail { ops, engine, .. } = detail;
        let mut at = step.end.saturating_sub(step.took);
        for (op, time) in ops {
            events.push(span(OPS, op, (origin, at, *time), Value::Null));
            at += *time;
        }
        let row = |RowDetail { request, label, tokens, context }: &RowDetail| {
            json!([request, label.as_deref(), tokens, context])
        };
        let rows: Vec<Value> = engine.rows.iter().map(row).collect();
        let args = json!({
            "step": detail.number, "[request, x-request-id, tokens, context]": rows, "waiting": engine.waiting,
            "kv_blocks_free": engine.kv_blocks_free,
        });
        let ts = origin + microseconds(step.end);
        events.push(json!({"name": "requests", "ph": "i", "s": "t", "pid": 1, "tid": STEPS, "ts": ts, "args": args}));
    }
    let op = anomaly.op.as_ref().map(|(op, us)| json!({"name": op, "excess_us": us}));
    let found = json!({
        "slow_step": anomaly.step, "took_us": anomaly.took_us, "predicted_us": anomaly.predicted_us,
        "cause": anomaly.cause.name(), "op": op, "summary": anomaly.to_string(),
        "version": env!("CARGO_PKG_VERSION"),
    });
    json!({"traceEvents": events, "otherData": found})
}

fn named(row: u32, name: &str) -> Value {
    json!({"name": "thread_name", "ph": "M", "pid": 1, "tid": row, "args": {"name": name}})
}

fn span(row: u32, name: &str, (origin, begin, duration): (f64, Duration, Duration), args: Value) -> Value {
    let (ts, dur) = (origin + microseconds(begin), microseconds(duration));
    json!({"name": name, "ph": "X", "pid": 1, "tid": row, "ts": ts, "dur": dur, "args": args})
}

fn microseconds(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

/// Unix time of a past instant, in microseconds.
fn unix_us(at: Instant) -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // Whole microseconds, because a float has no more digits.
    now.saturating_sub(at.elapsed()).as_micros() as f64
}

/// Starts a thread that writes the slow steps of `log` as files in `dir`, and logs them. `engine` is the number of the
/// engine if there are several.
pub fn write_captures(log: &StepLog, engine: Option<usize>, dir: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    let (sender, captures): (SyncSender<Capture>, Receiver<Capture>) = sync_channel(MAX_WAITING);
    let mut files = Files { dir: dir.to_path_buf(), engine, written: VecDeque::new() };
    let run = move || captures.iter().for_each(|capture| files.report(&capture));
    std::thread::Builder::new().name("step-trace".into()).spawn(run)?;
    log.capture(sender);
    Ok(())
}

/// The slow-step files of a server, oldest first.
struct Files {
    dir: PathBuf,
    engine: Option<usize>,
    written: VecDeque<PathBuf>,
}

impl Files {
    fn report(&mut self, capture: &Capture) {
        let anomaly = &capture.anomaly;
        let slow = self.engine.map_or_else(|| "slow".to_owned(), |engine| format!("engine {engine}: slow"));
        match self.write(capture) {
            // The following steps were as fast as before: nothing has to be done.
            Ok(path) if anomaly.cause == Cause::Once => log::info!("{slow} {anomaly}; trace {}", path.display()),
            Ok(path) => log::warn!("{slow} {anomaly}; trace {}", path.display()),
            Err(error) => log::warn!("{slow} {anomaly}; its trace cannot be written: {error}"),
        }
    }

    fn write(&mut self, capture: &Capture) -> std::io::Result<PathBuf> {
        let engine = self.engine.map(|engine| format!("engine-{engine}-")).unwrap_or_default();
        let name = format!("pegainfer-slow-step-{}-{engine}{}.json", std::process::id(), capture.anomaly.step);
        let path = self.dir.join(name);
        let written = File::create(&path).and_then(|file| {
            let mut out = BufWriter::new(file);
            serde_json::to_writer(&mut out, &self::capture(capture))?;
            out.flush()
        });
        if let Err(error) = written {
            // Report the error of the write, not of the removal.
            let _ = std::fs::remove_file(&path);
            return Err(error);
        }
        self.written.push_back(path.clone());
        if self.written.len() > MAX_FILES
            && let Some(oldest) = self.written.pop_front()
        {
            // Somebody may have moved the file.
            let _ = std::fs::remove_file(oldest);
        }
        Ok(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_core::ledger::{Anomaly, EngineDetail, StepLoad};
    use pegainfer_testing::TempDir;

    const LOAD: StepLoad = StepLoad { decode_rows: 2, decode_kv: 50, prefill_rows: 0, prefill_tokens: 0, pairs: 0 };

    /// Steps of 1 ms, starting 2 ms apart; step 3 is slow.
    fn slow(step: u64) -> Capture {
        let time = |number: u64| StepTime {
            number,
            end: Duration::from_millis(3 * (number + 1)),
            load: LOAD,
            took: Duration::from_millis(1),
            predicted_us: Some(500.0),
        };
        let ops = vec![("linear", Duration::from_micros(300)), ("attention", Duration::from_micros(600))];
        let row = |request, label: Option<&str>, context| {
            let label = label.map(Into::into);
            RowDetail { request, label, tokens: 1, context }
        };
        let rows = vec![row(7, Some("req-a#1"), 20), row(9, None, 30)];
        let engine = EngineDetail { rows, waiting: 4, kv_blocks_free: 11 };
        let op = Some(("attention".to_owned(), 500.0));
        let (took_us, predicted_us) = (1000.0, 500.0);
        Capture {
            anomaly: Anomaly { step, load: LOAD, took_us, predicted_us, cause: Cause::Op, op },
            steps: (0..5).map(time).collect(),
            details: vec![StepDetail { number: 3, ops, engine }],
            start: Instant::now(),
        }
    }

    #[test]
    fn a_capture_has_steps_pauses_ops_and_requests() {
        let trace = capture(&slow(3));
        let events = trace["traceEvents"].as_array().unwrap();
        let of = |row: u32| events.iter().filter(move |event| event["tid"] == row && event["ph"] == "X");
        let figures = |row: u32| of(row).map(|event| event["dur"].as_f64().unwrap()).collect::<Vec<_>>();
        assert_eq!(figures(STEPS), [1000.0; 5]);
        assert_eq!(figures(IDLE), [2000.0; 4]);
        let ops: Vec<&str> = of(OPS).map(|event| event["name"].as_str().unwrap()).collect();
        assert_eq!(ops, ["linear", "attention"]);
        let at = |row: u32, i: usize| of(row).nth(i).unwrap()["ts"].as_f64().unwrap();
        assert_eq!((at(OPS, 0), at(OPS, 1)), (at(STEPS, 3), at(STEPS, 3) + 300.0), "in their step, one after another");
        assert_eq!(of(STEPS).next().unwrap()["args"]["measured/predicted"], 2.0);
        let requests = &events.iter().find(|event| event["name"] == "requests").unwrap()["args"];
        let rows = &requests["[request, x-request-id, tokens, context]"];
        assert_eq!(*rows, json!([[7, "req-a#1", 1, 20], [9, null, 1, 30]]));
        assert_eq!((&requests["waiting"], &requests["kv_blocks_free"]), (&json!(4), &json!(11)));
        assert_eq!(
            (&trace["otherData"]["cause"], &trace["otherData"]["op"]["name"]),
            (&json!("op"), &json!("attention"))
        );
    }

    #[test]
    fn files_are_bounded() {
        let dir = TempDir::new("slow-steps");
        let mut files = Files { dir: dir.path().to_path_buf(), engine: None, written: VecDeque::new() };
        for step in 0..MAX_FILES as u64 + 5 {
            let path = files.write(&slow(step)).unwrap();
            let trace: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
            assert_eq!(trace["otherData"]["slow_step"], step);
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), MAX_FILES);
        files.dir = dir.path().join("missing");
        assert!(files.write(&slow(0)).is_err());
    }
}
