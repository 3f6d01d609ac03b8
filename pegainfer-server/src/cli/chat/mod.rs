//! `pegainfer chat`: a conversation in the terminal, or one answer in a pipe.
//!
//! # Layout
//! - [`input`]: the user's input: messages of several lines, commands, the history file. [`paths`]: paths in it.
//! - [`attachments`]: images that go with the next message.
//! - [`conversation`]: messages so far, and the request for the next one. [`settings`]: its generation parameters.
//!   [`context`]: drops the oldest turns when the context is full.
//! - [`answer`]: runs a request and reads its stream. [`screen`]: prints it, styled by [`markdown`], in lines
//!   broken by [`wrap`]. [`stats`]:
//!   tokens and times.

mod answer;
mod attachments;
mod context;
mod conversation;
mod generation;
mod input;
mod markdown;
mod paths;
mod screen;
mod settings;
mod stats;
mod wrap;

use crate::app::Options;
use crate::cli::local_server::{LoadedModel, LocalServer, async_runtime};
use crate::cli::on_demand::OnDemandArgs;
use crate::cli::piped::standard_input;
use crate::limits::{ImageFlags, Limits};
use answer::Outcome;
use anyhow::{Context, Result, bail};
use attachments::Attachments;
use clap::Args;
use conversation::Conversation;
use generation::Generation;
use input::{Input, InputLine};
use pegainfer_models::args::EngineArgs;
use screen::Screen;
use stats::Stats;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// Prompts that the bundled model was trained for.
const EXAMPLES: &str =
    "This is a tiny model. Try: What is the capital of France?  Or: Tell me a story about a girl named Lily.";

/// Examples for the help text.
pub const USE: &str = "\
In a terminal, /image FILE attaches an image to the next message, /model NAME asks another model of --models, /system TEXT restarts with a system message, /reset restarts, /help lists the commands, and /exit or Ctrl-D \
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
    /// Flags for several models.
    #[command(flatten)]
    pub on_demand: OnDemandArgs,
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
    let runtime = async_runtime()?;
    let server = if args.on_demand.is_used() && engine.model_path.is_none() {
        let specs = args.on_demand.specs(&engine, runtime.handle())?;
        LocalServer::on_demand(specs, args.on_demand.limits(&engine)?, Options::default(), &runtime)?
    } else {
        LocalServer::new(LoadedModel::load(&engine)?, Vec::new(), Options::default())
    };
    let conversation = Conversation::new(args.system.clone(), &args.generation);
    let done = if std::io::stdin().is_terminal() {
        let input = Input::open(args.history.clone())?;
        runtime.block_on(converse(&server, conversation, input, engine.model_path.is_none()))
    } else {
        runtime.block_on(answer_pipe(&server, conversation))
    };
    runtime.shutdown_background();
    done
}

/// Answers the text from the pipe as one message.
async fn answer_pipe(server: &LocalServer, mut conversation: Conversation) -> Result<()> {
    conversation.ask(&standard_input("pipe a message into this command")?, Vec::new());
    let mut screen = Screen::stdout();
    match answer::run(server, &conversation, &mut screen).await? {
        Outcome::Answered { .. } => Ok(()),
        Outcome::Refused(message) => bail!(message),
    }
}

/// A conversation on a terminal.
struct Dialogue<'a> {
    server: &'a LocalServer,
    conversation: Conversation,
    /// Images of the next message.
    attached: Attachments,
    image_limits: ImageFlags,
    screen: Screen,
    stats: Stats,
}

/// Runs the dialogue until the user leaves.
async fn converse(server: &LocalServer, conversation: Conversation, mut input: Input, is_bundled: bool) -> Result<()> {
    // Those of the server in this process.
    let image_limits = Limits::default().images;
    let (attached, screen, stats) = (Attachments::default(), Screen::stdout(), Stats::default());
    let mut dialogue = Dialogue { server, conversation, attached, image_limits, screen, stats };
    let screen = &mut dialogue.screen;
    screen.note(&format!("{}: /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves", server.name))?;
    if is_bundled {
        screen.note(EXAMPLES)?;
    }
    while let Some(line) = input.read()? {
        match line {
            InputLine::Exit => break,
            InputLine::Message(text) => dialogue.ask(&text).await?,
            line => {
                if let Some(note) = dialogue.command(line).await? {
                    dialogue.screen.note(&note)?;
                }
            }
        }
    }
    Ok(())
}

impl Dialogue<'_> {
    /// Runs a command. Returns what to tell the user.
    async fn command(&mut self, line: InputLine) -> Result<Option<String>> {
        Ok(Some(match line {
            InputLine::Nothing | InputLine::Exit | InputLine::Message(_) => return Ok(None),
            InputLine::Help => input::HELP.to_owned(),
            InputLine::Reset => {
                self.conversation.reset();
                self.attached.take();
                "the conversation restarts".to_owned()
            }
            InputLine::System(text) => {
                self.conversation.set_system(text);
                "the conversation restarts with this system message".to_owned()
            }
            InputLine::Image(file) if file.is_empty() => self.attached.list(),
            InputLine::Image(file) => self.attach(&file).await?,
            InputLine::Model(name) => self.choose(name),
            InputLine::Set(text) => settings::set(&mut self.conversation.settings, &text),
            InputLine::Stats => {
                let used = context::used(self.server, &self.conversation).await?;
                let limit = used.map_or(self.server.limits.max_model_len, |used| used.max_model_len);
                self.stats.text(used.map_or(0, |used| used.count), limit)
            }
            InputLine::Save(file) if file.is_empty() => "name a file, such as /save chat.json".to_owned(),
            InputLine::Save(file) => match save(&self.conversation, &file) {
                Ok(()) => format!("the conversation is in {file}"),
                Err(error) => format!("error: {error:#}"),
            },
            InputLine::Unknown(command) => format!("{command} is not a command; /help lists them"),
        }))
    }

    /// Attaches an image to the next message. Returns what to tell the user.
    async fn attach(&mut self, file: &str) -> Result<String> {
        if let Some(refusal) = attachments::refusal(self.server, self.conversation.model.as_deref()).await? {
            return Ok(refusal);
        }
        Ok(self.attached.attach(&paths::file(file), self.conversation.images(), &self.image_limits))
    }

    /// Lets another model answer from now on. Returns what to tell the user.
    fn choose(&mut self, name: String) -> String {
        let (names, current) = (&self.server.names, self.conversation.model.as_ref().unwrap_or(&self.server.name));
        if name.is_empty() {
            format!("{current} answers; there are {}", names.join(", "))
        } else if names.contains(&name) {
            let note = format!("{name} answers from now on");
            self.conversation.model = Some(name);
            note
        } else {
            format!("error: there is no model {name}, only {}", names.join(", "))
        }
    }

    /// Sends a message and prints the answer.
    async fn ask(&mut self, text: &str) -> Result<()> {
        let Self { server, conversation, attached, screen, stats, .. } = self;
        conversation.ask(text, attached.take());
        if let Some(tokens) = context::drop_oldest_turns(server, conversation).await?
            && !std::mem::replace(&mut conversation.is_told_full, true)
        {
            screen.note(&format!(
                "the context of {tokens} tokens is full: the oldest messages are no longer sent; /reset restarts"
            ))?;
        }
        match answer::run(server, conversation, screen).await? {
            Outcome::Answered { text, stats: answer } => {
                conversation.answered(text);
                answer.into_iter().for_each(|answer| stats.add(answer));
            }
            Outcome::Refused(message) => {
                let images = conversation.take_back();
                screen.note(&format!("error: {message}"))?;
                if images > 0 {
                    screen.note("the images of this message are no longer attached; /image attaches them again")?;
                }
            }
        }
        Ok(())
    }
}

/// Writes the conversation to a new file.
fn save(conversation: &Conversation, file: &str) -> Result<()> {
    let text = conversation.to_file()?;
    let write = || File::create_new(file)?.write_all(text.as_bytes());
    write().with_context(|| format!("{file} cannot be written"))
}
