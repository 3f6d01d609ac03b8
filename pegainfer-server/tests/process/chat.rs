//! `pegainfer chat` in a pseudo-terminal and in a pipe, and terminal output of all commands.

use crate::support::model_dir;
use crate::support::process::{pegainfer, run};
use crate::support::temp_dir::TempDir;
use crate::support::terminal::Terminal;
use serde_json::json;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

const QUESTION: &str = "What is the capital of France?";
const ANSWER: &str = "The capital of France is Paris.";
/// Written by the line editor after a complete line, to end bracketed paste.
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
    terminal.wait_for("restart with this system message");
    terminal.wait_for(PROMPT);
    terminal.press("/system Be brief.\r");
    terminal.wait_for("the conversation restarts with this system message");
    terminal.wait_for(PROMPT);
    terminal.press("/reset\r");
    terminal.wait_for("the conversation restarts");
    terminal.wait_for(PROMPT);
    terminal.press("/nonsense\r");
    terminal.wait_for("/nonsense is not a command; /help lists them");
    terminal.wait_for(PROMPT);
    // Lines between quotes are one message.
    terminal.press("\"\"\"What is the\rcapital of France?\"\"\"\r");
    terminal.wait_for(ENTERED);
    let answer = terminal.wait_for(PROMPT);
    assert!(!answer.contains("error"), "{answer:?}");
    // Ctrl-C clears a half-typed line.
    terminal.press("no message\x03");
    terminal.wait_for(PROMPT);
    // The arrow key recalls the previous line.
    terminal.press("\x1b[A");
    terminal.wait_for("capital of France?\"\"\"");
    terminal.press("\x03");
    terminal.wait_for(PROMPT);
    terminal.press("/exit\r");
    assert!(terminal.end().success());
    let kept = std::fs::read_to_string(&history).unwrap();
    assert!(kept.contains(&format!("\n{QUESTION}\n")) && kept.contains("What is the\\ncapital"), "{kept:?}");
    assert!(!kept.contains("no message"), "{kept:?}");

    // The next chat has the history of this one; Ctrl-D leaves it.
    let mut terminal = Terminal::start(&mut chat(&history));
    terminal.wait_for(PROMPT);
    terminal.press("\x1b[A");
    terminal.wait_for("/exit");
    terminal.press("\x03");
    terminal.wait_for(PROMPT);
    terminal.press("\x04");
    assert!(terminal.end().success());
}

/// Enters a line, and returns the output before the next prompt.
fn enter(terminal: &mut Terminal, line: &str) -> String {
    terminal.press(&format!("{line}\r"));
    terminal.wait_for(ENTERED);
    terminal.wait_for(PROMPT)
}

#[test]
fn commands_set_count_and_save() {
    let dir = TempDir::new("chat-commands");
    let mut terminal = Terminal::start(chat(&dir.0.join("history")).args(["--temperature", "0"]));
    terminal.wait_for(PROMPT);
    assert!(enter(&mut terminal, "/stats").contains("all answers: 0, with 0 tokens"));
    assert!(enter(&mut terminal, "/set temperature 200").contains("temperature is 200"));
    assert!(enter(&mut terminal, QUESTION).contains("error: temperature must be a number from 0 to 100"));
    assert!(enter(&mut terminal, "/set temperature 0").contains("temperature is 0"));
    assert!(enter(&mut terminal, QUESTION).contains(ANSWER));
    // Tab completes the command.
    let stats = enter(&mut terminal, "/sta\t");
    assert!(stats.contains("last answer: ") && stats.contains(" tokens a second"), "{stats:?}");
    assert!(stats.contains("all answers: 1, with ") && stats.contains("context: "), "{stats:?}");
    let file = dir.0.join("saved.json");
    let save = format!("/save {}", file.display());
    assert!(enter(&mut terminal, &save).contains("the conversation is in "));
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    assert_eq!(saved, json!({"messages": [message("user", QUESTION), message("assistant", ANSWER)]}));
    assert!(enter(&mut terminal, &save).contains("cannot be written: File exists"), "a file is not replaced");
    terminal.press("\x04");
    assert!(terminal.end().success());
}

#[test]
fn images_go_with_the_next_message() {
    let dir = TempDir::new("chat-images");
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pegainfer-images/tests/fixtures/sources");
    for name in ["small.png", "photo.jpg"] {
        std::fs::copy(sources.join(name), dir.0.join(name)).unwrap();
    }
    std::fs::write(dir.0.join("notes.png"), "no image").unwrap();
    let at = |name: &str| format!("/image {}", dir.0.join(name).display());
    let mut command = chat(&dir.0.join("history"));
    command.args(["--temperature", "0", "--max-tokens", "8"]).arg(model_dir().with_file_name("qwen35-vl-tiny"));
    let mut terminal = Terminal::start(&mut command);
    terminal.wait_for(PROMPT);
    assert!(enter(&mut terminal, "/image").contains("no image is attached; /image FILE attaches one"));
    // Tab completes the name.
    let told = enter(&mut terminal, &format!("{}\t", at("sm")));
    assert!(told.contains("small.png (PNG, ") && told.contains(" goes with the next message"), "{told:?}");
    assert!(enter(&mut terminal, &at("photo.jpg")).contains("photo.jpg (JPEG, "));
    assert!(enter(&mut terminal, &at("notes.png")).contains("notes.png: the image has no known format; send"));
    let list = enter(&mut terminal, "/image");
    assert!(list.contains("small.png (PNG, ") && list.contains("photo.jpg (JPEG, "), "{list:?}");
    let answer = enter(&mut terminal, "What do you see?");
    assert!(!answer.contains("error"), "{answer:?}");
    assert!(enter(&mut terminal, "/image").contains("no image is attached"), "they went with the message");
    let file = dir.0.join("saved.json");
    enter(&mut terminal, &format!("/save {}", file.display()));
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let content = saved["messages"][0]["content"].as_array().unwrap();
    assert_eq!((content.len(), &content[0]), (3, &json!({"type": "text", "text": "What do you see?"})));
    let url = |part: &serde_json::Value| part["image_url"]["url"].as_str().unwrap().to_owned();
    assert!(url(&content[1]).starts_with("data:image/png;base64,") && url(&content[2]).starts_with("data:image/jpeg;"));
    // The images stay in the conversation.
    let answer = enter(&mut terminal, "And what else?");
    assert!(!answer.contains("error"), "{answer:?}");
    let stats = enter(&mut terminal, "/stats");
    let (_, context) = stats.split_once("context: ").unwrap();
    let used: usize = context.split(' ').next().unwrap().replace(',', "").parse().unwrap();
    assert!(used > 140, "two images of 70 tokens: {stats:?}");
    enter(&mut terminal, &at("small.png"));
    enter(&mut terminal, "/reset");
    assert!(enter(&mut terminal, "/image").contains("no image is attached"));
    terminal.press("\x04");
    assert!(terminal.end().success());

    let mut terminal = Terminal::start(&mut chat(&dir.0.join("history")));
    terminal.wait_for(PROMPT);
    let told = enter(&mut terminal, &at("small.png"));
    assert!(told.contains("error: qwen3-tiny reads only text; start a model that reads images"), "{told:?}");
    terminal.press("\x04");
    assert!(terminal.end().success());
}

#[test]
fn a_terminal_breaks_lines_between_words_and_a_pipe_does_not() {
    const STORY: &str = "Tell me a story about a dog.";
    let dir = TempDir::new("chat-wrap");
    let command = || {
        let mut command = chat(&dir.0.join("history"));
        command.args(["--temperature", "0"]);
        command
    };
    let (_, piped, _) = piped(&mut command(), STORY);
    assert!(piped.lines().any(|line| line.len() > 120), "this story shows nothing: {piped:?}");
    let mut terminal = Terminal::start(&mut command());
    terminal.wait_for(PROMPT);
    let answer = enter(&mut terminal, STORY);
    let (answer, _) = answer.split_once(PROMPT).unwrap();
    // The terminal has 120 columns.
    assert!(answer.lines().all(|line| line.chars().count() <= 120), "{answer:?}");
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(words(answer), words(&piped));
    terminal.press("\x04");
    assert!(terminal.end().success());
}

#[test]
fn the_oldest_turns_go_when_the_context_is_full() {
    let dir = TempDir::new("chat-full");
    let mut command = chat(&dir.0.join("history"));
    let mut terminal = Terminal::start(command.args(["--temperature", "0", "--max-model-len", "128"]));
    terminal.wait_for(PROMPT);
    let answers: String = (0..8).map(|_| enter(&mut terminal, QUESTION)).collect();
    let told = "the context of 128 tokens is full: the oldest messages are no longer sent; /reset restarts";
    assert_eq!(answers.matches(told).count(), 1, "{answers:?}");
    assert!(!answers.contains("error"), "{answers:?}");
    let stats = enter(&mut terminal, "/stats");
    let (_, context) = stats.split_once("context: ").unwrap();
    // A message that is too long alone is refused, and removes nothing.
    assert!(enter(&mut terminal, &"word ".repeat(200)).contains("error: "));
    assert!(enter(&mut terminal, "/stats").contains(context.lines().next().unwrap()), "{stats:?}");
    terminal.press("\x04");
    assert!(terminal.end().success());
}

#[test]
fn control_c_stops_the_answer_and_not_the_program() {
    let dir = TempDir::new("chat-stop");
    // No token ends this model's texts, so they continue to the end of the context, which takes many seconds.
    let context = json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}).to_string();
    let model = dir.0.join("model");
    link_model(&model, &["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]);
    std::fs::copy(model_dir().join("chat_template.jinja"), model.join("chat_template.jinja")).unwrap();
    std::fs::write(model.join("generation_config.json"), json!({"eos_token_id": [0]}).to_string()).unwrap();
    let mut terminal = Terminal::start(
        chat(&dir.0.join("history")).args(["--temperature", "0", "--rope-scaling", &context]).arg(&model),
    );
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
    // The prompt ends inside the reasoning.
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

#[test]
fn generate_reads_a_pipe_and_knows_the_bundled_model_by_its_name() {
    let command = || {
        let mut command = pegainfer();
        command.args(["generate", "--temperature", "0", "--log-level", "warn", "--model-path", "qwen3-tiny"]);
        command
    };
    let (code, stdout, stderr) = piped(&mut command(), "The capital of France is\n");
    assert_eq!((code, stdout.as_str(), stderr.as_str()), (Some(0), " Paris.\n", ""));
    let (code, _, stderr) = piped(&mut command(), "");
    let expected = "error: standard input is empty: give the text to continue, or pipe it into this command\n";
    assert_eq!((code, stderr.as_str()), (Some(1), expected));
}

/// Sets the terminal's title, clears the screen with a C1 control, and reverses the direction of writing.
const HOSTILE: &str = "\x1b]0;PWN\x07\u{9b}2J\u{202e}";
/// The same text, escaped.
const SHOWN: &str = "\\u{1b}]0;PWN\\u{7}\\u{9b}2J\\u{202e}";

/// Checks the output of a program on a terminal or in a log: the hostile text is there, but escaped.
fn assert_harmless(door: &str, text: &str) {
    assert!(text.contains("PWN"), "{door}: {text:?}");
    assert_clean(door, text);
}

fn assert_clean(door: &str, text: &str) {
    // The program and the line editor have their own styles; neither sets titles.
    let is_hostile = |c: char| matches!(c, '\x07' | '\x7f' | '\u{80}'..='\u{9f}' | '\u{202a}'..='\u{202e}');
    assert!(!text.contains("\x1b]") && !text.contains(is_hostile), "{door}: {text:?}");
}

/// Runs in a terminal; returns the exit code and the output.
fn shown(command: &mut Command) -> (Option<i32>, String) {
    let (status, text) = Terminal::start(command).end_with_text();
    (status.code(), text)
}

/// A checkpoint directory with a hostile name, and `files` instead of the bundled model's.
fn hostile_model(dir: &Path, files: &[(&str, String)]) -> std::path::PathBuf {
    let model = dir.join(format!("model{HOSTILE}"));
    let _ = std::fs::remove_dir_all(&model);
    let all = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"];
    let linked: Vec<&str> = all.into_iter().filter(|name| files.iter().all(|(other, _)| other != name)).collect();
    link_model(&model, &linked);
    for (name, text) in files {
        std::fs::write(model.join(name), text).unwrap();
    }
    model
}

#[test]
fn generated_text_is_exact_in_a_pipe_and_harmless_on_a_terminal() {
    let command = || {
        let mut command = pegainfer();
        command.args(["generate", "x", "--load-format", "dummy", "--max-tokens", "800", "--seed", "2"]);
        // All tokens are about equally likely, including those of control characters.
        command.args(["--temperature", "50", "--top-k", "0", "--top-p", "1"]);
        command
    };
    let is_control = |c: char| c.is_control() && !"\n\r\t".contains(c);
    let (code, piped, stderr) = run(&mut command());
    assert!(code == Some(0) && piped.contains(is_control), "the text of a pipe is what the model wrote: {stderr}");
    let (code, screen) = shown(&mut command());
    // The progress of loading comes first, and ends with a cleared line.
    let (_, screen) = screen.rsplit_once("\x1b[2K").unwrap();
    assert!(code == Some(0) && !screen.contains(is_control) && screen.contains("\\u{"), "{screen:?}");
}

#[test]
fn a_hostile_model_does_not_reach_the_terminal_of_a_chat() {
    let dir = TempDir::new("hostile-chat");
    let template = format!("{{{{ raise_exception('{HOSTILE}') }}}}");
    let model = hostile_model(&dir.0, &[("chat_template.jinja", template)]);
    let mut terminal = Terminal::start(chat(&dir.0.join("history")).arg(&model));
    assert_harmless("name of the model", &terminal.wait_for(PROMPT));
    terminal.press("hello\r");
    terminal.wait_for(ENTERED);
    assert_harmless("raise_exception", &terminal.wait_for(PROMPT));
    terminal.press("\x04");
    assert!(terminal.end().success());
    let (code, _, stderr) = piped(chat(&dir.0.join("history")).arg(&model), "hello");
    assert_eq!(code, Some(1));
    assert_harmless("raise_exception in a pipe", &stderr);
}

#[test]
fn names_in_files_do_not_reach_the_terminal_or_the_log() {
    let dir = TempDir::new("hostile-names");
    let config = |fields: serde_json::Value| {
        let text = std::fs::read_to_string(model_dir().join("config.json")).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
        config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        ("config.json", config.to_string())
    };
    let forged = format!("{HOSTILE}\nerror: forged");
    let model_type = config(json!({"architectures": [&forged], "model_type": forged}));
    let quant_method = config(json!({"quantization_config": {"quant_method": HOSTILE}}));
    for (door, file) in [("model_type", model_type), ("quant_method", quant_method)] {
        let model = hostile_model(&dir.0, &[file]);
        let (code, text) = shown(pegainfer().args(["generate", "x", "--model-path"]).arg(&model));
        assert_eq!(code, Some(1), "{text:?}");
        assert_harmless(door, &text);
        assert!(!text.contains("\nerror: forged"), "{text:?}");
        // The filter does not depend on the destination of the error.
        assert!(run(pegainfer().args(["generate", "x", "--model-path"]).arg(&model)).2.contains(SHOWN), "{door}");
    }
    let snapshot = dir.0.join(format!("hub/models--org--name{HOSTILE}/snapshots/main"));
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::write(snapshot.join("config.json"), json!({"model_type": format!("{HOSTILE}\nNAME forged")}).to_string())
        .unwrap();
    let (code, text) = shown(pegainfer().arg("models").env("HF_HOME", &dir.0));
    assert!(code == Some(0) && !text.contains("\nNAME forged"), "{text:?}");
    assert_harmless("models", &text);

    let file = |name: &str, text: String| {
        let path = dir.0.join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let quoted = serde_json::to_string(HOSTILE).unwrap();
    let settings = file("settings.toml", "\"\\u001b]0;PWN\\u0007\\u009b2J\\u202e\" = 1\n".into());
    let value = file("value.toml", "log-format = \"\\u001b]0;PWN\\u0007\"\n".into());
    let recording = format!("{{\"record\":1,\"model\":{quoted},\"version\":{quoted},\"prompts\":\"ids\"}}\n");
    let recording = file("recording.jsonl", recording);
    let batch = file("batch.jsonl", format!("{{{quoted}: 1}}\n"));
    let id = json!({"custom_id": HOSTILE, "method": "POST", "url": "/v1/completions", "body": {}}).to_string();
    let double = file("double.jsonl", format!("{id}\n{id}\n"));
    let out = dir.0.join("out.jsonl");
    let run_batch = |input: &Path| {
        let mut command = pegainfer();
        command.args(["run-batch", "-i"]).arg(input).arg("-o").arg(&out);
        command
    };
    let arg = |args: &[&str]| {
        let mut command = pegainfer();
        command.args(args);
        command
    };
    // clap leaves out the escape sequence itself.
    let (code, text) = shown(&mut arg(&["generate", "x", HOSTILE]));
    assert_eq!(code, Some(2), "{text:?}");
    assert_clean("argument", &text);
    let doors: [(&str, Option<i32>, Command); 8] = [
        ("key of --config", Some(2), arg(&["--config", settings.to_str().unwrap()])),
        ("value of --config", Some(2), arg(&["--config", value.to_str().unwrap()])),
        ("name of a variable's value", Some(2), {
            let mut command = pegainfer();
            command.env("PEGAINFER_LOG_FORMAT", HOSTILE);
            command
        }),
        ("header of a recording", Some(0), arg(&["replay", recording.to_str().unwrap()])),
        ("field of run-batch", Some(1), run_batch(&batch)),
        ("custom_id of run-batch", Some(1), run_batch(&double)),
        ("file that is missing", Some(1), run_batch(&dir.0.join(HOSTILE))),
        ("name of the model", Some(2), arg(&["--served-model-name", HOSTILE])),
    ];
    for (door, expected, mut command) in doors {
        let (code, text) = shown(&mut command);
        assert_eq!(code, expected, "{door}: {text:?}");
        assert_harmless(door, &text);
    }
}
