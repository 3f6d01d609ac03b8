//! Standard error of commands, next to the log.

use crate::printable::{is_control, one_line, printable};
use std::io::Write;

/// Prints a line; control characters of names and files in it are escaped. If nobody can read it, the exit code still says that a
/// command failed.
pub fn print(line: &str) {
    let _ = writeln!(std::io::stderr(), "{}", printable(line));
}

/// Prints why a command failed: one line, whatever names are in it.
pub fn error(sentence: &str) {
    print(&format!("error: {}", one_line(sentence)));
}

/// Prints the help, the version or what is wrong with a command line, and exits.
pub fn exit(error: &clap::Error) -> ! {
    let text = error.render().to_string();
    // The text repeats arguments. Only one without control characters may have clap's colours.
    if !text.contains(|c| is_control(c) && c != '\n' && c != '\t') {
        error.exit();
    }
    print(text.trim_end());
    std::process::exit(error.exit_code())
}
