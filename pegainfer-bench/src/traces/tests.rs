//! The readers on small files in the formats of the published traces.

use super::*;
use pegainfer_testing::TempDir;

fn fixture(name: &str) -> Trace {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/traces").join(name);
    Trace::read(&path).unwrap_or_else(|error| panic!("{error}"))
}

/// Arrival in microseconds, prompt tokens and output tokens of each request.
fn load(trace: &Trace) -> Vec<(u128, usize, usize)> {
    trace.requests.iter().map(|it| (it.at.as_micros(), it.prompt_len, it.output_len)).collect()
}

fn sessions(trace: &Trace) -> Vec<(Option<u64>, Option<f64>)> {
    trace.requests.iter().map(|it| (it.session, it.delay.map(|delay| delay.as_secs_f64()))).collect()
}

/// The error of a file with this text.
fn refused(text: &str) -> String {
    let dir = TempDir::new("traces");
    let path = dir.path().join("t");
    std::fs::write(&path, text).unwrap();
    let error = Trace::read(&path).expect_err(text).to_string();
    error.replace(&*path.to_string_lossy(), "FILE")
}

#[test]
fn azure() {
    let old = fixture("azure-2023.csv");
    assert_eq!((old.format, old.skipped), (&azure::FORMAT, 0));
    // 46.6805900 to 50.9951690, 51.2225670 and 51.3935940.
    assert_eq!(load(&old), [(0, 374, 44), (4_314_579, 396, 109), (4_541_977, 879, 55), (4_713_004, 91, 16)]);
    let new = fixture("azure-2024.csv");
    assert_eq!(load(&new), [(0, 2162, 5), (19_930, 2399, 6), (1_010_000, 76, 15)]);
    assert!(new.requests.iter().all(|it| it.session.is_none() && it.blocks.is_empty() && it.ids.is_none()));
    assert_eq!(new.duration(), Duration::from_millis(1010));
}

#[test]
fn burst_gpt() {
    let old = fixture("burstgpt-1.csv");
    assert_eq!((old.format, old.skipped), (&burst_gpt::FORMAT, 1), "one request failed");
    assert_eq!(load(&old), [(0, 47, 18), (40_000_000, 87, 23), (113_000_000, 41, 27)]);
    assert_eq!(sessions(&old), [(None, None); 3]);
    let new = fixture("burstgpt-3.csv");
    assert_eq!(new.skipped, 1);
    assert_eq!(load(&new), [(0, 90, 44), (51_000_000, 36, 29), (60_500_000, 120, 12), (70_000_000, 150, 31)]);
    // The session's first request took 43 of the 70 seconds before its second one.
    assert_eq!(sessions(&new), [(Some(0), None), (Some(1), None), (None, None), (Some(0), Some(27.0))]);
}

#[test]
fn mooncake() {
    let plain = fixture("mooncake.jsonl");
    assert_eq!((plain.format, plain.skipped), (&mooncake::FORMAT, 0));
    assert_eq!(load(&plain), [(0, 1030, 20), (3_052_000, 1100, 16), (3_052_000, 40, 30)]);
    let prompts: Vec<Vec<u32>> = plain.requests.iter().map(|it| it.prompt(1000, 1)).collect();
    let common = prompts[0].iter().zip(&prompts[1]).take_while(|(a, b)| a == b).count();
    assert!((1024..1027).contains(&common), "{common}: two blocks of 512 tokens");
    let extended = fixture("mooncake-sessions.jsonl");
    // The second request of the first session has no time. It comes a quarter of a second after the first one.
    assert_eq!(load(&extended), [(0, 600, 12), (200_500, 80, 9), (250_000, 700, 10)]);
    assert_eq!(sessions(&extended), [(Some(0), None), (Some(1), None), (Some(0), Some(0.25))]);
}

#[test]
fn bailian() {
    let trace = fixture("bailian.jsonl");
    assert_eq!((trace.format, trace.skipped), (&bailian::FORMAT, 0));
    assert_eq!(load(&trace), [(0, 40, 13), (386_000, 36, 8), (14_136_000, 70, 21), (14_886_000, 20, 5)]);
    assert_eq!(sessions(&trace), [(Some(0), None), (Some(1), None), (Some(0), None), (Some(2), None)]);
    let prompts: Vec<Vec<u32>> = trace.requests.iter().map(|it| it.prompt(1000, 1)).collect();
    assert!(prompts[0][..32] == prompts[1][..32] && prompts[0][..32] == prompts[2][..32]);
    assert!(prompts[0][32..] != prompts[1][32..] && prompts[3][..16] != prompts[0][..16]);
}

#[test]
fn recordings() {
    let trace = fixture("recording.jsonl");
    // Two lines are missing, a request was cancelled before its first token, and one has no end.
    assert_eq!((trace.format, trace.skipped), (&recording::FORMAT, 4));
    assert_eq!(load(&trace), [(0, 40, 30), (500_000, 20, 8), (3_500_000, 90, 5)]);
    // The third prompt begins with the blocks of the first request, which ended two seconds before.
    assert_eq!(sessions(&trace), [(Some(0), None), (Some(1), None), (Some(0), Some(2.0))]);
    let prompts: Vec<Vec<u32>> = trace.requests.iter().map(|it| it.prompt(1000, 1)).collect();
    assert!(prompts[0][..32] == prompts[2][..32] && prompts[1][..16] != prompts[2][..16]);
    assert_eq!(trace.requests[2].blocks[4], u64::MAX);
}

#[test]
fn recorded_ids_and_lengths() {
    let dir = TempDir::new("recorded-traces");
    let read = |prompts: &str, fields: &str| {
        let path = dir.path().join(prompts);
        let header = format!(r#"{{"record":1,"model":"m","version":"v","prompts":"{prompts}"}}"#);
        let add = format!(r#"{{"t":0.5,"add":7,"prompt_tokens":3,"max_tokens":9,"priority":0{fields}}}"#);
        let end = r#"{"t":0.75,"end":7,"tokens":2,"reason":"stop","hash":"0123456789abcdef"}"#;
        std::fs::write(&path, format!("{header}\n{add}\n{end}\n")).unwrap();
        Trace::read(&path).unwrap()
    };
    let ids = read("ids", r#","ids":[4,5,6]"#);
    assert_eq!((load(&ids), ids.requests[0].prompt(100, 1)), (vec![(0, 3, 2)], vec![4, 5, 6]));
    let lengths = read("lengths", "");
    assert_eq!((load(&lengths), lengths.requests[0].ids.clone()), (vec![(0, 3, 2)], None));
    assert_eq!(sessions(&lengths), [(None, None)]);
}

#[test]
fn requests_are_in_the_order_of_arrival() {
    let dir = TempDir::new("order");
    let path = dir.path().join("t.csv");
    // Columns are found by name, in any order and case, among others.
    std::fs::write(&path, "GeneratedTokens,x,timestamp,ContextTokens\n1,,2024-05-10 00:00:09,10\n2,,2024-05-10 00:00:07,20\n3,,2024-05-10 00:00:07,30\n")
        .unwrap();
    let trace = Trace::read(&path).unwrap();
    assert_eq!(load(&trace), [(0, 20, 2), (0, 30, 3), (2_000_000, 10, 1)]);
    assert_eq!(trace.requests.iter().map(|it| it.number).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(load(&Trace::read_first(&path, 2).unwrap()), [(0, 20, 2), (2_000_000, 10, 1)]);
}

#[test]
fn unknown_files_are_refused_with_what_is_known() {
    for text in
        ["", "time,tokens\n1,2\n", "{\"prompt\":\"x\",\"timestamp\":1}\n", "{\"record\":9}\n", "PK\u{3}\u{4}", "[1]"]
    {
        let error = refused(text);
        assert!(error.starts_with("FILE is not a known trace: its first line is"), "{text:?}: {error}");
        for known in ["Azure LLM inference: CSV with TIMESTAMP", "BurstGPT", "Mooncake", "Qwen-Bailian", "--record"] {
            assert!(error.contains(known), "{error}");
        }
    }
    let missing = Trace::read(Path::new("/nowhere/t.csv")).unwrap_err().to_string();
    assert_eq!(missing, "the trace /nowhere/t.csv cannot be read");
}

#[test]
fn bad_lines_are_refused_with_their_number() {
    let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1\n\n";
    for (line, reason) in [
        ("2023-11-16 18:15:47,1", "it has 2 columns, the header 3"),
        ("2023-11-16 18:15:47,one,1", "\"one\" is not a number: invalid digit found in string"),
        ("2023-11-16 18:15:47,-5,1", "\"-5\" is not a number"),
        ("yesterday,5,1", "its time cannot be used"),
        ("1969-01-01 00:00:00,5,1", "is before 1970"),
    ] {
        let error = refused(&format!("{azure}{line}\n"));
        assert!(error.starts_with("FILE, line 4: ") && error.contains(reason), "{error}");
    }
    let burst = refused("Timestamp,Request tokens,Response tokens\n-1,1,1\n");
    assert_eq!(burst, "FILE, line 2: -1 is not a time");
    let mooncake = "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 5}\n";
    for (line, reason) in [
        ("{\"timestamp\": 1, \"output_length\": 5}", "missing field `input_length`"),
        ("{\"input_length\": 1, \"output_length\": 5}", "neither a timestamp nor a session_id"),
        ("{\"timestamp\": 1, \"input_length\": 5", "EOF while parsing"),
    ] {
        let error = refused(&format!("{mooncake}{line}\n"));
        assert!(error.starts_with("FILE, line 2: ") && error.contains(reason), "{error}");
    }
    let header = r#"{"record":1,"model":"m","version":"v","prompts":"hashes"}"#;
    let added = r#"{"t":0,"add":0,"prompt_tokens":3,"max_tokens":9,"priority":0,"hashes":["xyz"]}"#;
    assert_eq!(refused(&format!("{header}\n{added}\n")), "FILE, line 2: \"xyz\" is not a hash");
}

#[test]
fn times_and_lengths_that_nobody_waits_for_are_refused() {
    let line = |fields: &str| format!("{{\"input_length\": 5, \"output_length\": 5, {fields}}}\n");
    let first = line("\"timestamp\": 0");
    let error = refused(&(first.clone() + &line("\"timestamp\": 1e15")));
    assert_eq!(
        error,
        "FILE: the last request comes 11574074 days after the first one, and a trace may last 366 days; are its times (timestamp, \
         milliseconds) of another unit?"
    );
    for (fields, reason) in [
        ("\"timestamp\": 1e300", "is not a time"),
        ("\"session_id\": 1, \"delay\": 1e14", "its delay is 1157407 days, and must be at most 366"),
        ("\"timestamp\": 1, \"input_tokens\": 4611686018427387904", "its prompt has 4611686018427387904 tokens"),
    ] {
        let fields = if fields.contains("input_tokens") {
            format!("{{{}, \"output_length\": 5}}\n", fields)
        } else {
            line(fields)
        };
        let error = refused(&(first.clone() + &fields));
        assert!(error.starts_with("FILE, line 2: ") && error.contains(reason), "{error}");
    }
    // Times since 1970 are counted from the first one.
    let text = line("\"timestamp\": 1.7e12") + &line("\"timestamp\": 1.7000864e12");
    let dir = TempDir::new("epoch");
    let path = dir.path().join("t");
    std::fs::write(&path, text).unwrap();
    assert_eq!(Trace::read(&path).unwrap().duration(), Duration::from_secs(86_400));
}
