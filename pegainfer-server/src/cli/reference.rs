//! Generates docs/reference/cli.md from the definition of the command line.

use crate::cli::Cli;
use crate::cli::settings::is_setting;
use anyhow::Result;
use clap::{Arg, Args, Command, CommandFactory};
use pegainfer_bench::bench::args::CommonArgs;
use pegainfer_models::args::EngineArgs;
use pegainfer_terminal::stdout::print_exact;
use std::fmt::Write;

const INTRO: &str = "<!-- Generated: `pegainfer cli-reference > docs/reference/cli.md`. -->

# Command line

`pegainfer` without a command is `pegainfer serve`. `pegainfer COMMAND --help` prints the flags of a command.

Each flag can also be set in the environment and in the file of `--config`, under the name that the
[configuration](configuration.md) page explains: `--max-num-seqs 64` is `PEGAINFER_MAX_NUM_SEQS=64` or `max-num-seqs = 64`.
Sizes in bytes take the suffixes K, M, G and T (powers of 1024) and KB, MB, GB and TB (powers of 1000); times are seconds,
with a fraction if needed. The exit code is 0 after success, 1 after an error, and 2 for a command line or setting that
cannot be used.
";

/// Prints the reference.
pub fn run() -> Result<()> {
    print_exact(&render())
}

/// The reference.
fn render() -> String {
    let mut root = Cli::command();
    root.build();
    let groups = [
        Group::new::<EngineArgs>("Model and engine flags", &[]),
        Group::new::<CommonArgs>("Flags of every benchmark", &["Model and engine flags"]),
    ];
    let mut page = INTRO.to_owned();
    page += "\n| Command | |\n|---|---|\n";
    let commands: Vec<&Command> = root.get_subcommands().filter(|command| is_shown(command)).collect();
    for command in &commands {
        let (name, about) = (command.get_name(), about(command));
        let _ = writeln!(page, "| [`{name}`](#pegainfer-{name}) | {about} |");
    }
    let config = root.get_arguments().filter(|arg| arg.is_global_set());
    let _ = writeln!(page, "\n## Flags of every command\n");
    table(&mut page, config);
    commands.iter().for_each(|command| section(&mut page, command, &groups, 2));
    for group in &groups {
        let _ = writeln!(page, "\n## {}\n", group.title);
        table(&mut page, group.args.iter().filter(|arg| !groups.iter().any(|other| other.is_part_of(group, arg))));
    }
    page
}

/// Flags that several commands have.
struct Group {
    title: &'static str,
    args: Vec<Arg>,
    /// Titles of the groups that this one includes.
    includes: &'static [&'static str],
}

impl Group {
    fn new<A: Args>(title: &'static str, includes: &'static [&'static str]) -> Self {
        let mut command = A::augment_args(Command::new("group").disable_help_flag(true));
        // Flags without a value get their default.
        command.build();
        Self { title, args: command.get_arguments().cloned().collect(), includes }
    }

    /// True if the flag belongs to the group, with the same default.
    fn has(&self, arg: &Arg) -> bool {
        let is_same = |own: &Arg| own.get_id() == arg.get_id() && own.get_default_values() == arg.get_default_values();
        self.args.iter().any(is_same)
    }

    /// True if a command takes all flags of the group.
    fn is_in(&self, command: &Command) -> bool {
        self.args.iter().all(|own| command.get_arguments().any(|arg| arg.get_id() == own.get_id()))
    }

    /// True if the group of `arg` is included in `other`.
    fn is_part_of(&self, other: &Self, arg: &Arg) -> bool {
        other.includes.contains(&self.title) && self.has(arg)
    }
}

fn is_shown(command: &Command) -> bool {
    !command.is_hide_set() && command.get_name() != "help"
}

fn about(command: &Command) -> String {
    command.get_about().map(ToString::to_string).unwrap_or_default()
}

/// The section of a command and those of its subcommands.
fn section(page: &mut String, command: &Command, groups: &[Group], level: usize) {
    let path = command.get_bin_name().unwrap_or_else(|| command.get_name());
    let _ = writeln!(page, "\n{} {path}\n\n{}.\n", "#".repeat(level), about(command));
    let usage = command.clone().render_usage().to_string();
    let _ = writeln!(page, "    {}", usage.trim_start_matches("Usage: ").trim());
    let groups_here: Vec<&Group> = groups.iter().filter(|group| group.is_in(command)).collect();
    let is_grouped = |arg: &Arg| groups_here.iter().any(|group| group.has(arg));
    let shown = |arg: &&Arg| !arg.is_hide_set() && !arg.is_global_set() && !is_grouped(arg);
    let own: Vec<&Arg> =
        command.get_arguments().filter(shown).filter(|arg| arg.is_positional() || is_setting(arg)).collect();
    if !own.is_empty() {
        page.push('\n');
        table(page, own.into_iter());
    }
    if let Some(text) = command.get_after_help() {
        let _ = writeln!(page, "\n{text}");
    }
    for group in groups_here {
        let anchor = group.title.to_lowercase().replace(' ', "-");
        let _ = writeln!(page, "\nAlso takes the [{}](#{anchor}).", group.title.to_lowercase());
    }
    command
        .get_subcommands()
        .filter(|command| is_shown(command))
        .for_each(|command| section(page, command, groups, level + 1));
}

fn table<'a>(page: &mut String, args: impl Iterator<Item = &'a Arg>) {
    *page += "| Flag | Default | |\n|---|---|---|\n";
    for arg in args {
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        // A default that depends on something is written out in the help text.
        let (text, in_words) = match help.split_once(" [default: ") {
            Some((text, default)) => (text.to_owned(), default.trim_end_matches(']').to_owned()),
            None => (help, String::new()),
        };
        let values: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
        let is_switch = !arg.get_action().takes_values();
        let default = match values.is_empty() || is_switch {
            true => in_words,
            false => format!("`{}`", values.join(",")),
        };
        let _ =
            writeln!(page, "| `{}` | {} | {}{} |", escape(&flag(arg)), escape(&default), escape(&text), choices(arg));
    }
}

/// The flag and the name of its value.
fn flag(arg: &Arg) -> String {
    let value = arg.get_value_names().map(|names| names.join(" ")).unwrap_or_default();
    let short = arg.get_short().map(|short| format!("-{short}, ")).unwrap_or_default();
    match arg.get_long() {
        Some(long) if arg.get_action().takes_values() => format!("{short}--{long} {value}"),
        Some(long) => format!("{short}--{long}"),
        None if arg.is_required_set() => value,
        None => format!("[{value}]"),
    }
}

/// The values of a flag with few values.
fn choices(arg: &Arg) -> String {
    let values = if arg.get_action().takes_values() { arg.get_possible_values() } else { Vec::new() };
    let names: Vec<_> = values.iter().map(|value| format!("`{}`", value.get_name())).collect();
    match names.is_empty() {
        true => String::new(),
        false => format!(": {}", names.join(", ")),
    }
}

fn escape(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::settings::variable_name;

    /// The page depends on the features, because they add commands.
    #[cfg(feature = "deepseek-v4")]
    #[test]
    fn the_page_is_up_to_date() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/cli.md");
        let page = std::fs::read_to_string(path).unwrap_or_default();
        assert!(page == render(), "run: pegainfer cli-reference > docs/reference/cli.md");
    }

    #[test]
    fn every_flag_is_on_the_page() {
        let page = render();
        let mut commands = vec![Cli::command()];
        while let Some(command) = commands.pop() {
            for long in command.get_arguments().filter(|arg| is_setting(arg)).filter_map(|arg| arg.get_long()) {
                assert!(page.contains(&format!("--{long}")), "--{long}");
            }
            commands.extend(command.get_subcommands().filter(|command| is_shown(command)).cloned());
        }
        assert!(page.contains(&variable_name("max-num-seqs")));
    }
}
