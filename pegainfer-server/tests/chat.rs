//! `pegainfer chat`, in a pseudo-terminal and in a pipe.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use serde_json::json;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use support::model_dir;
use support::process::{pegainfer, run};
use support::temp_dir::TempDir;
use support::terminal::Terminal;

const QUESTION: &str = "What is the capital of France?";
const ANSWER: &str = "The capital of France is Paris.";
/// Written by the line editor when a line is complete: it stops to bracket what is pasted.
const ENTERED: &str = "\x1b[?2004l";
/// Written by the line editor when it waits for a line.
const PROMPT: &str = "\x1b[?2004h";

fn chat(history: &Path) -> Command {
    let mut command = pegainfer();
    command.args(["chat", "--threads", "2", "--history"]).arg(history);
    command
}

/// A directory with these files of the bundled model.
fn link_model(dir: &Path, files: &[&str]) {
    std::fs::create_dir(dir).unwrap();
    for name in files {
        std::os::unix::fs::symlink(model_dir().join(name).canonicalize().unwrap(), dir.join(name)).unwrap();
    }
}

#[test]
fn a_conversation_in_a_terminal() {
    let dir = TempDir::new("chat");
    let history = dir.0.join("state/history");
    let mut terminal = Terminal::start(chat(&history).args(["--temperature", "0"]));
    terminal.wait_for("qwen3-tiny: /help lists the commands");
    terminal.wait_for(PROMPT);
    terminal.press(&format!("{QUESTION}\r"));
    terminal.wait_for(ENTERED);
    let answer = terminal.wait_for(PROMPT);
    assert!(answer.contains(&format!("{ANSWER}\r\n")), "{answer:?}");
    terminal.press("/help\r");
    terminal.wait_for("start anew with this system message");
    terminal.wait_for(PROMPT);
    terminal.press("/system Be brief.\r");
    terminal.wait_for("the conversation starts anew with this system message");
    terminal.wait_for(PROMPT);
    terminal.press("/reset\r");
    terminal.wait_for("the conversation starts anew");
    terminal.wait_for(PROMPT);
    terminal.press("/nonsense\r");
    terminal.wait_for("/nonsense is not a command; /help lists them");
    terminal.wait_for(PROMPT);
    // Lines between quotes are one message.
    terminal.press("\"\"\"What is the\rcapital of France?\"\"\"\r");
    terminal.wait_for(ENTERED);
    let answer = terminal.wait_for(PROMPT);
    assert!(!answer.contains("error"), "{answer:?}");
    // A half-typed line is cleared.
    terminal.press("no message\x03");
    terminal.wait_for(PROMPT);
    // The line before is a key away.
    terminal.press("\x1b[A");
    terminal.wait_for("capital of France?\"\"\"");
    terminal.press("\x03");
    terminal.wait_for(PROMPT);
    terminal.press("/exit\r");
    assert!(terminal.end().success());
    let kept = std::fs::read_to_string(&history).unwrap();
    assert!(kept.contains(&format!("\n{QUESTION}\n")) && kept.contains("What is the\\ncapital"), "{kept:?}");
    assert!(!kept.contains("no message"), "{kept:?}");

    // The next chat knows the lines of this one; Ctrl-D leaves it.
    let mut terminal = Terminal::start(&mut chat(&history));
    terminal.wait_for(PROMPT);
    terminal.press("\x1b[A");
    terminal.wait_for("/exit");
    terminal.press("\x03");
    terminal.wait_for(PROMPT);
    terminal.press("\x04");
    assert!(terminal.end().success());
}

#[test]
fn control_c_stops_the_answer_and_not_the_program() {
    let dir = TempDir::new("chat-stop");
    // No token ends this model's texts: they go on to the end of the context.
    let model = dir.0.join("model");
    link_model(&model, &["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]);
    std::fs::copy(model_dir().join("chat_template.jinja"), model.join("chat_template.jinja")).unwrap();
    std::fs::write(model.join("generation_config.json"), json!({"eos_token_id": [0]}).to_string()).unwrap();
    let mut terminal = Terminal::start(chat(&dir.0.join("history")).args(["--temperature", "0"]).arg(&model));
    for _ in 0..2 {
        terminal.wait_for(PROMPT);
        terminal.press("Tell a story.\r");
        terminal.wait_for(ENTERED);
        terminal.wait_for_length(50);
        terminal.press("\x03");
        let answer = terminal.wait_for("[stopped]");
        assert!(answer.len() > 50, "{answer:?}");
    }
    terminal.wait_for(PROMPT);
    terminal.press("/exit\r");
    assert!(terminal.end().success());
}

#[test]
fn reasoning_is_dimmed() {
    let dir = TempDir::new("chat-reasoning");
    let model = dir.0.join("model");
    let files =
        ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"];
    link_model(&model, &files);
    // The prompt ends within the reasoning.
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}{# </think> #}";
    std::fs::write(model.join("chat_template.jinja"), template).unwrap();
    let command = || {
        let mut command = chat(&dir.0.join("history"));
        command.args(["--temperature", "0", "--max-tokens", "5"]).arg(&model);
        command
    };
    let mut terminal = Terminal::start(&mut command());
    terminal.wait_for(PROMPT);
    terminal.press(&format!("{QUESTION}\r"));
    terminal.wait_for(ENTERED);
    let answer = terminal.wait_for("the maximum number of tokens is reached");
    let (dimmed, _) = answer.split_once("\x1b[0m").unwrap();
    let (_, reasoning) = dimmed.split_once("\x1b[2m").unwrap();
    assert!(!reasoning.trim().is_empty(), "{answer:?}");
    terminal.wait_for(PROMPT);
    terminal.press("\x04");
    assert!(terminal.end().success());

    let (code, stdout, _) = piped(&mut command(), QUESTION);
    assert_eq!((code, stdout.as_str()), (Some(0), ""), "only the answer goes into a pipe");
}

/// Runs with this text on standard input.
fn piped(command: &mut Command, text: &str) -> (Option<i32>, String, String) {
    let dir = TempDir::new("chat-pipe");
    let path = dir.0.join("input");
    std::fs::File::create(&path).unwrap().write_all(text.as_bytes()).unwrap();
    run(command.stdin(Stdio::from(std::fs::File::open(path).unwrap())))
}

#[test]
fn a_pipe_is_one_message() {
    let history = Path::new("/nonexistent/history");
    let (code, stdout, stderr) = piped(chat(history).args(["--temperature", "0"]), &format!("{QUESTION}\n"));
    assert_eq!((code, stdout, stderr.as_str()), (Some(0), format!("{ANSWER}\n"), ""));
    let (code, stdout, stderr) = piped(chat(history).args(["--temperature", "200"]), QUESTION);
    assert_eq!((code, stdout.as_str()), (Some(1), ""));
    assert!(stderr.starts_with("error: temperature must be a number from 0 to 100"), "{stderr}");
    let (code, _, stderr) = piped(&mut chat(history), " \n");
    assert_eq!(
        (code, stderr.trim_end()),
        (Some(1), "error: standard input is empty: pipe a message into this command")
    );
}
