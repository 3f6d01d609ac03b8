//! The user's input: a line editor with history, messages of several lines, commands.

use super::{paths, settings};
use anyhow::{Context as _, Result};
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Config, Context, Editor, Helper};
use std::path::PathBuf;

const PROMPT: &str = "> ";
/// Encloses a message of several lines.
const QUOTES: &str = "\"\"\"";
const COMMANDS: [&str; 9] = ["/exit", "/help", "/image ", "/model ", "/reset", "/save ", "/set ", "/stats", "/system "];

pub(super) const HELP: &str = "\
/system TEXT  restart with this system message; without a text, with none
/reset        restart, also without attached images
/image FILE   attach a PNG, JPEG, WebP or GIF file to the next message; without FILE, list what is attached
/model NAME   ask this model from now on; without NAME, list them
/set NAME X   set temperature, top_p or another sampling field; without X, to its default; without NAME, list them
/stats        tokens, tokens a second, and how full the context is
/save FILE    write the conversation as JSON, which the web UI imports
/exit         leave, as does Ctrl-D
\"\"\"           begins and ends a message of several lines; a \\ at the end of a line continues it, too
Tab           completes a command, a setting or the name of an image
Ctrl-C        stops an answer, or clears the line";

/// Meaning of an input line.
#[derive(Debug, PartialEq)]
pub(super) enum InputLine {
    Nothing,
    Message(String),
    System(String),
    Model(String),
    Reset,
    Image(String),
    Set(String),
    Stats,
    Save(String),
    Help,
    Exit,
    Unknown(String),
}

impl InputLine {
    fn parse(text: &str) -> Self {
        let text = text.trim();
        if let Some(quoted) = text.strip_prefix(QUOTES) {
            return Self::message(quoted.strip_suffix(QUOTES).unwrap_or(quoted));
        }
        let text = text.replace("\\\n", "\n");
        if !text.starts_with('/') {
            return Self::message(&text);
        }
        let (command, rest) = text.split_once(char::is_whitespace).unwrap_or((&text, ""));
        match command {
            "/system" => Self::System(rest.trim().to_owned()),
            "/model" => Self::Model(rest.trim().to_owned()),
            "/reset" => Self::Reset,
            "/image" => Self::Image(rest.trim().to_owned()),
            "/set" => Self::Set(rest.trim().to_owned()),
            "/stats" => Self::Stats,
            "/save" => Self::Save(rest.trim().to_owned()),
            "/help" | "/?" => Self::Help,
            "/exit" | "/quit" | "/bye" => Self::Exit,
            // A path is not a command.
            path if path[1..].contains('/') => Self::message(&text),
            other => Self::Unknown(other.to_owned()),
        }
    }

    fn message(text: &str) -> Self {
        match text.trim() {
            "" => Self::Nothing,
            text => Self::Message(text.to_owned()),
        }
    }
}

/// The line editor.
pub(super) struct Input {
    editor: Editor<Assistance, FileHistory>,
    /// `None` if the history cannot be kept.
    history: Option<PathBuf>,
}

impl Input {
    /// Opens the terminal; `history` is the file with earlier lines.
    pub(super) fn open(history: Option<PathBuf>) -> Result<Self> {
        let config = Config::builder().auto_add_history(false).build();
        let mut editor = Editor::with_config(config).context("the terminal cannot be used")?;
        editor.set_helper(Some(Assistance));
        let history = history.or_else(default_history);
        if let Some(path) = &history {
            if let Some(dir) = path.parent() {
                let _ = std::fs::create_dir_all(dir);
            }
            // There is no history before the first chat.
            let _ = editor.load_history(path);
        }
        Ok(Self { editor, history })
    }

    /// The next line; `None` at the end of the input.
    pub(super) fn read(&mut self) -> Result<Option<InputLine>> {
        match self.editor.readline(PROMPT) {
            Ok(text) => {
                self.remember(&text);
                Ok(Some(InputLine::parse(&text)))
            }
            Err(ReadlineError::Interrupted) => Ok(Some(InputLine::Nothing)),
            Err(ReadlineError::Eof) => Ok(None),
            Err(error) => Err(error).context("the terminal cannot be read"),
        }
    }

    fn remember(&mut self, text: &str) {
        if text.trim().is_empty() || !self.editor.add_history_entry(text).unwrap_or(false) {
            return;
        }
        let Some(path) = &self.history else { return };
        if let Err(error) = self.editor.append_history(path) {
            log::warn!("the history cannot be written to {}: {error}", path.display());
            self.history = None;
        }
    }
}

fn default_history() -> Option<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let state = state.or_else(|| Some(std::env::home_dir()?.join(".local/state")))?;
    Some(state.join("pegainfer/chat-history"))
}

/// Editor callbacks while the user types.
struct Assistance;

impl Helper for Assistance {}
impl Highlighter for Assistance {}
impl Hinter for Assistance {
    type Hint = String;
}

impl Completer for Assistance {
    type Candidate = String;

    fn complete(&self, line: &str, pos: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<String>)> {
        Ok(completions(&line[..pos]))
    }
}

impl Validator for Assistance {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match is_complete(context.input()) {
            true => ValidationResult::Valid(None),
            false => ValidationResult::Incomplete,
        })
    }
}

/// Where the completed word begins, and its completions: commands, names of `/set`, or files of `/image`.
fn completions(typed: &str) -> (usize, Vec<String>) {
    const SET: &str = "/set ";
    const IMAGE: &str = "/image ";
    if let Some(path) = typed.strip_prefix(IMAGE) {
        return (IMAGE.len(), paths::images(path));
    }
    let (start, words) = match typed.strip_prefix(SET) {
        Some(_) => (SET.len(), &settings::NAMES[..]),
        None => (0, &COMMANDS[..]),
    };
    let begun = words.iter().filter(|word| typed.starts_with('/') && word.starts_with(&typed[start..]));
    (start, begun.map(ToString::to_string).collect())
}

/// True if the message is complete.
fn is_complete(text: &str) -> bool {
    match text.trim().strip_prefix(QUOTES) {
        Some(rest) => rest.ends_with(QUOTES),
        None => !text.ends_with('\\'),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_several_lines_in_quotes_or_after_a_backslash() {
        for (text, complete) in [
            ("hello", true),
            ("a\\", false),
            ("a\\\nb", true),
            ("\"\"\"", false),
            ("\"\"\"a\nb", false),
            ("\"\"\"a\nb\"\"\"", true),
        ] {
            assert_eq!(is_complete(text), complete, "{text}");
        }
        let message = |text: &str| InputLine::Message(text.into());
        assert_eq!(InputLine::parse("\"\"\"a\n\nb\n\"\"\""), message("a\n\nb"));
        assert_eq!(InputLine::parse("a\\\nb"), message("a\nb"));
    }

    #[test]
    fn commands_and_settings_are_completed() {
        assert_eq!(completions("/re"), (0, vec!["/reset".to_owned()]));
        assert_eq!(completions("/s").1, ["/save ", "/set ", "/stats", "/system "]);
        assert_eq!(completions("/set top"), (5, vec!["top_k".to_owned(), "top_p".to_owned()]));
        assert!(completions("/set ").1.len() == settings::NAMES.len() && completions("re").1.is_empty());
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../pegainfer-images/tests/fixtures/sources");
        let (start, files) = completions(&format!("/image {dir}/sm"));
        assert_eq!((start, files), (7, vec![format!("{dir}/small.png")]));
        assert_eq!(completions("/im").1, ["/image "]);
        assert!(completions("").1.is_empty() && completions("/set top_k 5").1.is_empty());
    }

    #[test]
    fn commands_begin_with_a_slash() {
        assert_eq!(InputLine::parse(" /reset "), InputLine::Reset);
        assert_eq!(InputLine::parse("/system  Be brief. "), InputLine::System("Be brief.".into()));
        assert_eq!(InputLine::parse("/system"), InputLine::System(String::new()));
        assert_eq!(InputLine::parse("/model org/small"), InputLine::Model("org/small".into()));
        assert_eq!(InputLine::parse("/nonsense x"), InputLine::Unknown("/nonsense".into()));
        assert_eq!(InputLine::parse("/etc/hosts has what?"), InputLine::Message("/etc/hosts has what?".into()));
        assert_eq!(InputLine::parse("/set top_k 5"), InputLine::Set("top_k 5".into()));
        assert_eq!(InputLine::parse("/save a b.json "), InputLine::Save("a b.json".into()));
        assert_eq!(InputLine::parse("/image a b.png "), InputLine::Image("a b.png".into()));
        assert_eq!(InputLine::parse("/image"), InputLine::Image(String::new()));
        assert_eq!(InputLine::parse("/stats"), InputLine::Stats);
        assert_eq!((InputLine::parse(""), InputLine::parse("\"\"\"\"\"\"")), (InputLine::Nothing, InputLine::Nothing));
    }
}
