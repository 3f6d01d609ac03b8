//! `pegainfer chat`: a conversation in the terminal, or one answer in a pipe.
//!
//! # Layout
//! - [`input`]: the user's input: messages of several lines, commands, the history file.
//! - [`conversation`]: messages so far, and the request for the next one.
//! - [`answer`]: runs a request and reads its stream. [`screen`]: prints it.

mod answer;
mod conversation;
mod input;
mod screen;

use crate::app::Options;
use crate::cli::local_server::{LoadedModel, LocalServer, async_runtime};
use answer::Outcome;
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use conversation::{Conversation, Generation};
use input::{Input, InputLine};
use pegainfer_models::args::EngineArgs;
use screen::Screen;
use std::io::{IsTerminal, Read};
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// Maximum bytes of a message that comes from a pipe.
const MAX_PIPED: u64 = 8 << 20;

/// Examples for the help text.
pub const USE: &str = "\
In a terminal, /system TEXT restarts with a system message, /reset restarts, /help lists the commands, and /exit or Ctrl-D \
leaves. Ctrl-C stops an answer. Put a message of several lines between triple quotes, or end each line but the last one with a \
backslash. Piped input is one message, and only its answer is printed.";

/// Flags of `chat`.
#[derive(Debug, Clone, Args)]
pub struct ChatArgs {
    /// Checkpoint directory or GGUF file, or a Hugging Face id such as Qwen/Qwen3-0.6B to download; the same as
    /// --model-path
    #[arg(value_name = "DIR|ID")]
    pub model: Option<String>,
    /// Model and engine flags.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// System message
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Generation parameters.
    #[command(flatten)]
    pub generation: Generation,
    /// File with the lines that were typed, for the arrow keys [default: ~/.local/state/pegainfer/chat-history]
    #[arg(long, value_name = "FILE")]
    pub history: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: &ChatArgs) -> Result<()> {
    let mut engine = args.engine.clone();
    engine.model_path = args.model.clone().or(engine.model_path);
    // A chat is one sequence, so the KV cache of one conversation is enough.
    engine.max_num_seqs.get_or_insert(NonZeroUsize::MIN);
    let server = LocalServer::new(LoadedModel::load(&engine)?, Vec::new(), Options::default());
    let conversation = Conversation::new(args.system.clone(), args.generation.clone());
    let runtime = async_runtime()?;
    let done = if std::io::stdin().is_terminal() {
        let input = Input::open(args.history.clone())?;
        runtime.block_on(converse(&server, conversation, input))
    } else {
        runtime.block_on(answer_pipe(&server, conversation))
    };
    runtime.shutdown_background();
    done
}

/// Answers the text from the pipe as one message.
async fn answer_pipe(server: &LocalServer, mut conversation: Conversation) -> Result<()> {
    let mut bytes = Vec::new();
    std::io::stdin().take(MAX_PIPED + 1).read_to_end(&mut bytes).context("standard input cannot be read")?;
    ensure!(bytes.len() as u64 <= MAX_PIPED, "standard input has more than {MAX_PIPED} bytes");
    let text = String::from_utf8(bytes).context("standard input is not UTF-8")?;
    ensure!(!text.trim().is_empty(), "standard input is empty: pipe a message into this command");
    conversation.ask(text.trim_end());
    let mut screen = Screen::stdout();
    match answer::run(server, &conversation, &mut screen).await? {
        Outcome::Answered { .. } => Ok(()),
        Outcome::Refused(message) => bail!(message),
    }
}

/// Runs the dialogue until the user leaves.
async fn converse(server: &LocalServer, mut conversation: Conversation, mut input: Input) -> Result<()> {
    let mut screen = Screen::stdout();
    screen.note(&format!("{}: /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves", server.name))?;
    while let Some(line) = input.read()? {
        match line {
            InputLine::Nothing => {}
            InputLine::Help => screen.note(input::HELP)?,
            InputLine::Reset => {
                conversation.reset();
                screen.note("the conversation restarts")?;
            }
            InputLine::System(text) => {
                conversation.set_system(text);
                screen.note("the conversation restarts with this system message")?;
            }
            InputLine::Exit => break,
            InputLine::Unknown(command) => screen.note(&format!("{command} is not a command; /help lists them"))?,
            InputLine::Message(text) => {
                conversation.ask(&text);
                match answer::run(server, &conversation, &mut screen).await? {
                    Outcome::Answered { text } => conversation.answered(text),
                    Outcome::Refused(message) => {
                        conversation.take_back();
                        screen.note(&format!("error: {message}"))?;
                    }
                }
            }
        }
    }
    Ok(())
}
