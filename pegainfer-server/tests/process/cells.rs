//! `pegainfer bench cells`: the cells of public benchmarks, over HTTP.

use crate::bench::{CPU, report, strict_server, workload};
use crate::support::model_dir;
use crate::support::process::{pegainfer, run};
use pegainfer_bench::bench::bench;
use pegainfer_server::cli::InProcess;
use serde_json::{Value, json};

#[test]
fn cells_have_their_lengths_and_name_the_flags_of_the_server() {
    let (url, model) = (strict_server(), model_dir());
    let flags = ["bench", "cells", "inferencex", "--concurrency", "4,8", "--requests", "1", "--url", &url];
    let dir = crate::support::temp_dir::TempDir::new("bench-cells");
    let (file, plot) = (dir.0.join("cells.json"), dir.0.join("cells.svg"));
    let mut command = pegainfer();
    command.args(flags).args(CPU).arg("--model-path").arg(&model).arg("--json").arg(&file).arg("--svg").arg(&plot);
    let (code, table, stderr) = run(&mut command);
    assert_eq!(code, Some(0), "{stderr}");
    let json: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!((&json["workload"], &json["cells"]["unofficial"]), (&json!("cells"), &json!(true)));
    let rows = json["rows"].as_array().unwrap();
    let cell = |row: &Value| ["prompt_len", "output_len", "streams", "requests"].map(|key| row[key].as_u64().unwrap());
    let expected =
        [(1024, 1024), (1024, 8192), (8192, 1024)].map(|(prompt, output)| [4, 8].map(|n| [prompt, output, n, n]));
    assert_eq!(rows.iter().map(cell).collect::<Vec<_>>(), expected.concat());
    assert!(rows.iter().all(|row| row["rounds"].as_array().unwrap().len() == 1), "one run by default");
    assert!(table.contains(": InferenceX, unofficial\n"), "{table}");
    assert!(table.contains(r#""synthetic_acceptance_length":2.49}'"#), "{table}");
    let line = table.lines().find(|line| line.trim_start().starts_with("8192")).unwrap();
    let columns: Vec<&str> = line.split('|').next().unwrap().split_whitespace().collect();
    assert_eq!(columns, ["8192", "1024", "4"], "{table}");
    assert!(table.contains("4 of 4 stopped before their length"), "the server generates two tokens: {table}");
    assert!(std::fs::read_to_string(&plot).unwrap().contains("8192 / 1024"), "a line for each pair of lengths");
}

#[test]
fn cells_are_measured_on_a_server_of_this_process() {
    let report = report(&["cells", "artificial-analysis", "--concurrency", "2", "--requests", "1"]);
    assert_eq!((report.rows.len(), report.target.as_str()), (1, "http inside the process"));
    let median = &report.rows[0].median;
    assert_eq!((median.requests, median.failed, median.prompt_tokens, median.output_tokens), (2, 0, 1000.0, 1000.0));
}

#[test]
fn a_concurrency_that_is_no_cell_is_refused() {
    let error = bench(&workload(&["cells", "sglang", "--concurrency", "2"]), &InProcess).unwrap_err().to_string();
    assert_eq!(error, "SGLang cookbook has no cell of concurrency 2: there are [1, 16, 64, 256, 1024]");
}
