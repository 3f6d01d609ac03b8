//! `pegainfer models`: the models in the cache.

use crate::support::model_dir;
use crate::support::process::{pegainfer, run};
use crate::support::temp_dir::TempDir;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

const COMMIT: &str = "0123456789012345678901234567890123456789";

/// Adds a model with these files to the cache.
fn add(home: &Path, folder: &str, files: &[(&str, &[u8])]) -> PathBuf {
    let repo = home.join("hub").join(folder);
    let snapshot = repo.join("snapshots").join(COMMIT);
    for dir in [&snapshot, &repo.join("blobs"), &repo.join("refs")] {
        std::fs::create_dir_all(dir).unwrap();
    }
    std::fs::write(repo.join("refs/main"), COMMIT).unwrap();
    for (name, content) in files {
        std::fs::write(repo.join("blobs").join(name), content).unwrap();
        symlink(format!("../../blobs/{name}"), snapshot.join(name)).unwrap();
    }
    snapshot
}

fn models(home: &Path, args: &[&str]) -> Command {
    let mut command = pegainfer();
    command.env("HF_HOME", home).arg("models").args(args);
    command
}

#[test]
fn models_are_listed_found_and_deleted() {
    let home = TempDir::new("models");
    let list = || run(&mut models(&home.0, &[]));
    let (code, stdout, _) = list();
    assert_eq!((code, stdout), (Some(0), format!("{} has no models\n", home.0.join("hub").display())));

    let config = std::fs::read(model_dir().join("config.json")).unwrap();
    let weights = vec![0; 1_500_000];
    let tiny = add(&home.0, "models--test--tiny", &[("config.json", &config), ("model.safetensors", &weights)]);
    add(&home.0, "models--test--half--done", &[("config.json", &config)]);
    add(&home.0, "models--meta-llama--Llama-3.1-8B", &[("config.json", br#"{"architectures": ["LlamaForCausalLM"]}"#)]);
    let mut quantised: serde_json::Value = serde_json::from_slice(&config).unwrap();
    quantised["quantization_config"] = serde_json::json!({"quant_method": "awq", "bits": 3, "group_size": 128});
    let quantised = quantised.to_string();
    let files = [("config.json", quantised.as_bytes()), ("model.safetensors", &weights)];
    add(&home.0, "models--test--quantised", &files);
    add(&home.0, "datasets--test--set", &[]);
    std::fs::create_dir_all(home.0.join("hub/models--test--empty")).unwrap();
    let (code, stdout, stderr) = list();
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    let names: Vec<&str> = stdout.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(
        names,
        ["NAME", "meta-llama/Llama-3.1-8B", "test/empty", "test/half--done", "test/quantised", "test/tiny"],
        "{stdout}"
    );
    for (row, end) in [
        (1, "no: LlamaForCausalLM is not supported"),
        (2, "no: its config.json is missing"),
        (3, "incomplete, 0 % (Qwen3): pegainfer pull test/half--done downloads the rest"),
        (
            4,
            "no: config.json asks for quantization_config.bits = 3, which this engine does not implement; it serves 4 bits",
        ),
        (5, "1.50 MB  yes (Qwen3)"),
    ] {
        assert!(stdout.lines().nth(row).unwrap().ends_with(end), "{stdout}");
    }

    let (code, _, stderr) = run(&mut models(&home.0, &["path", "test/half--done"]));
    assert_eq!(code, Some(1));
    assert!(stderr.contains("test/half--done is not complete: pegainfer pull test/half--done downloads"), "{stderr}");
    let (code, stdout, _) = run(&mut models(&home.0, &["path", "test/tiny"]));
    assert_eq!((code, stdout), (Some(0), format!("{}\n", tiny.display())));
    // Nothing is deleted if one of the names is unknown.
    let (code, _, stderr) = run(&mut models(&home.0, &["rm", "test/tiny", "test/none"]));
    assert_eq!(code, Some(1));
    assert!(stderr.contains(" has no model test/none: pegainfer models lists those that it has"), "{stderr}");
    let (code, stdout, _) = run(&mut models(&home.0, &["rm", "test/tiny", "test/empty"]));
    assert_eq!((code, stdout.as_str()), (Some(0), "deleted test/tiny (1.50 MB)\ndeleted test/empty (0 B)\n"));
    let mut left: Vec<_> =
        std::fs::read_dir(home.0.join("hub")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    let others = ["models--meta-llama--Llama-3.1-8B", "models--test--half--done", "models--test--quantised"];
    assert_eq!(left[0], "datasets--test--set");
    assert_eq!(left[1..], others);
}
