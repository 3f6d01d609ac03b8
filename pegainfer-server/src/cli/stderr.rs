//! Standard error of commands, next to the log.

use crate::printable::{is_control, one_line, printable};
use std::io::Write;

/// Prints a line with its control characters escaped. Errors of writing are ignored: the exit code still says that a
/// command failed.
pub fn print(line: &str) {
    let _ = writeln!(std::io::stderr(), "{}", printable(line));
}

/// Prints why a command failed, always on one line.
pub fn error(sentence: &str) {
    print(&format!("error: {}", one_line(sentence)));
}

/// Prints the help, the version or a usage error, and exits.
pub fn exit(error: &clap::Error) -> ! {
    let text = error.render().to_string();
    // The text repeats arguments. It has clap's colours only if they contain no control characters.
    if !text.contains(|c| is_control(c) && c != '\n' && c != '\t') {
        error.exit();
    }
    print(text.trim_end());
    std::process::exit(error.exit_code())
}
