//! Settings, completions and manual pages of the built binary.

use crate::support::process::{pegainfer, run};
use crate::support::temp_dir::TempDir;
use std::io::Write;
use std::process::{Command, Stdio};

/// The only line of standard error of a command that ends with exit code 2.
fn invalid(command: &mut Command) -> String {
    let (code, stdout, stderr) = run(command);
    assert_eq!((code, stdout.as_str(), stderr.lines().count()), (Some(2), "", 1), "{stderr}");
    stderr.trim_end().to_owned()
}

#[test]
fn settings_that_cannot_be_used_are_one_sentence_and_exit_code_2() {
    let dir = TempDir::new("settings");
    let path = dir.0.join("pegainfer.toml");
    let shown = path.display();
    std::fs::write(&path, "max-num-seq = 4\n").unwrap();
    let error = invalid(pegainfer().arg("--config").arg(&path));
    assert_eq!(error, format!("error: {shown}: max-num-seq is not a known setting; did you mean max-num-seqs?"));
    std::fs::write(&path, "port = \"80a\"\n").unwrap();
    let error = invalid(pegainfer().arg("serve").env("PEGAINFER_CONFIG", &path));
    assert_eq!(error, format!("error: {shown}: port has the invalid value \"80a\": it is not a whole number"));
    let error = invalid(pegainfer().env("PEGAINFER_PORT", "abc"));
    assert_eq!(error, "error: PEGAINFER_PORT has the invalid value \"abc\": it is not a whole number");
}

#[test]
fn the_environment_and_a_file_set_flags() {
    let dir = TempDir::new("settings-used");
    let path = dir.0.join("pegainfer.toml");
    std::fs::write(&path, "max-tokens = 1\nlog-format = \"json\"\n").unwrap();
    let mut command = pegainfer();
    command.args(["generate", "The capital of France is"]).arg("--config").arg(&path);
    let (code, stdout, stderr) = run(command.env("PEGAINFER_TEMPERATURE", "0"));
    assert_eq!((code, stdout.as_str()), (Some(0), " Paris\n"), "{stderr}");
    assert!(stderr.lines().all(|line| line.starts_with('{')), "{stderr}");
}

#[test]
fn a_misspelt_variable_is_a_warning() {
    let (code, _, stderr) = run(pegainfer().args(["generate", "x", "--max-tokens", "1"]).env("PEGAINFER_SEEED", "1"));
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains(" WARN PEGAINFER_SEEED is not a known setting; did you mean PEGAINFER_SEED?"), "{stderr}");
}

#[test]
fn completions_are_scripts_of_their_shells() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let (code, script, stderr) = run(pegainfer().args(["completions", shell]));
        assert_eq!((code, stderr.as_str()), (Some(0), ""));
        assert!(script.contains("max-num-seqs"), "{shell}");
        if shell == "bash" {
            let mut bash = Command::new("bash").arg("-n").stdin(Stdio::piped()).spawn().unwrap();
            bash.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
            assert!(bash.wait().unwrap().success());
        }
    }
}

#[test]
fn manual_pages_name_every_command() {
    let (code, page, _) = run(pegainfer().arg("man"));
    assert_eq!(code, Some(0));
    assert!(page.contains(".TH pegainfer 1") && page.contains("pegainfer\\-serve(1)"), "{page}");
    let dir = TempDir::new("man");
    let (code, stdout, stderr) = run(pegainfer().arg("man").arg(&dir.0));
    assert_eq!((code, stdout.as_str(), stderr.as_str()), (Some(0), "", ""));
    for name in ["pegainfer", "pegainfer-serve", "pegainfer-bench-latency"] {
        let page = std::fs::read_to_string(dir.0.join(format!("{name}.1"))).unwrap();
        assert!(page.contains(".SH OPTIONS"), "{name}");
    }
}
