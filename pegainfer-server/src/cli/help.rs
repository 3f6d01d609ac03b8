//! The help text: flags in groups, the usual ones first, and errors in the user's words.

use clap::{Arg, Command};

/// Headings, and the long names of their flags. Flags in no group are those of one command.
const GROUPS: [(&str, &[&str]); 8] = [
    (
        "Model",
        &[
            "model-path",
            "revision",
            "hub-ca",
            "served-model-name",
            "task",
            "device",
            "tensor-parallel-size",
            "data-parallel-size",
            "threads",
            "load-format",
            "quantization",
            "exact-activations",
            "fp8-prompts",
            "language-model-only",
            "rope-scaling",
            "speculative-config",
            "enable-lora",
            "lora-modules",
            "lora-root",
            "plain-messages",
            "no-prompt-normalization",
        ],
    ),
    (
        "Memory",
        &[
            "max-model-len",
            "max-num-seqs",
            "max-num-batched-tokens",
            "mixed-step-token-budget",
            "kv-cache-memory",
            "kv-cache-dtype",
            "kv-offloading-size",
            "kv-disk",
            "state-cache-memory",
            "state-cache-interval",
            "gpu-memory-utilization",
            "gpu-memory-limit",
            "max-loras",
            "max-lora-rank",
            "max-cpu-loras",
        ],
    ),
    (
        "Several models",
        &["models", "models-dir", "models-memory", "max-loaded-models", "model-idle-time", "model-wait"],
    ),
    (
        "Server",
        &[
            "host",
            "port",
            "grpc-port",
            "log-level",
            "log-format",
            "strict",
            "keep-alive-interval",
            "drain-timeout",
            "kv-events-config",
        ],
    ),
    (
        "Limits",
        &[
            "max-queued-requests",
            "max-body-size",
            "max-inflight-bytes",
            "min-body-rate",
            "min-read-rate",
            "max-response-bytes",
            "max-connections",
            "max-requests-per-key",
            "request-timeout",
            "client-timeout",
            "max-grammar-time",
            "max-grammar-memory",
            "max-images",
            "max-image-tokens",
            "max-image-bytes",
            "max-image-pixels",
            "max-image-memory",
            "allowed-image-hosts",
            "allow-priority",
            "step-deadline",
        ],
    ),
    (
        "Security",
        &[
            "api-key",
            "api-key-file",
            "admin-key",
            "admin-key-file",
            "admin-local",
            "trusted-proxy",
            "allowed-host",
            "cors-allow-origin",
            "tls-cert",
            "tls-key",
            "share-prefix-cache",
        ],
    ),
    (
        "Tracing",
        &[
            "record",
            "record-prompts",
            "record-max-bytes",
            "record-steps",
            "ledger",
            "trace-dir",
            "trace-max-bytes",
            "otlp-endpoint",
            "trace-sampling-ratio",
        ],
    ),
    ("Development", &["cuda-graph", "check-ranks", "loop-back-ranks", "lose-engine", "dummy-router-skew"]),
];

/// The flags of the groups that `-h` shows; `--help` shows all.
const USUAL: [&str; 10] = [
    "model-path",
    "served-model-name",
    "device",
    "quantization",
    "max-model-len",
    "max-num-seqs",
    "kv-cache-memory",
    "host",
    "port",
    "api-key-file",
];

/// Errors of Rust's parsers of numbers, and what they mean to the user.
const WORDS: [(&str, &str); 5] = [
    ("number would be zero for non-zero type", "it must be at least 1"),
    ("invalid digit found in string", "it is not a whole number"),
    ("number too large to fit in target type", "it is too large"),
    ("cannot parse integer from empty string", "it is empty"),
    ("invalid float literal", "it is not a number"),
];

/// The command and its subcommands with their flags in groups.
pub(super) fn in_groups(command: Command) -> Command {
    command.mut_args(in_group).mut_subcommands(in_groups)
}

pub(super) fn in_group(arg: Arg) -> Arg {
    let Some(long) = arg.get_long().map(str::to_owned) else { return arg };
    match GROUPS.iter().find(|(_, flags)| flags.contains(&long.as_str())) {
        Some((heading, _)) => arg.help_heading(*heading).hide_short_help(!USUAL.contains(&long.as_str())),
        None => arg,
    }
}

/// An error with the words of Rust's parsers replaced; `None` if it has none of them.
pub fn in_words(error: &str) -> Option<String> {
    let (rust, words) = WORDS.iter().find(|(rust, _)| error.contains(rust))?;
    Some(error.replace(rust, words))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use crate::cli::settings::is_setting;
    use clap::CommandFactory;
    use std::collections::BTreeSet;

    #[test]
    fn every_flag_of_serve_is_in_one_group() {
        let mut root = Cli::command();
        root.build();
        let serve = root.find_subcommand("serve").unwrap();
        let flags: Vec<&str> = serve
            .get_arguments()
            .filter(|arg| is_setting(arg) && !arg.is_global_set())
            .filter_map(Arg::get_long)
            .collect();
        let grouped: Vec<&str> = GROUPS.iter().flat_map(|(_, flags)| *flags).copied().collect();
        assert_eq!(flags.iter().collect::<BTreeSet<_>>(), grouped.iter().collect::<BTreeSet<_>>());
        assert_eq!(flags.len(), grouped.len(), "a flag is in two groups");
    }

    #[test]
    fn short_help_has_the_usual_flags_in_groups() {
        let mut root = Cli::command();
        root.build();
        let short = root.render_help().to_string();
        for name in USUAL {
            assert!(short.contains(&format!("--{name} ")), "{name}: {short}");
        }
        for name in ["loop-back-ranks", "check-ranks", "step-deadline"] {
            assert!(!short.contains(&format!("--{name}")), "{name}: {short}");
        }
        assert!(short.lines().count() < 60, "{} lines", short.lines().count());
        let long = root.render_long_help().to_string();
        for (heading, _) in GROUPS {
            assert!(long.contains(&format!("\n{heading}:\n")), "{heading}: {long}");
        }
    }

    #[test]
    fn errors_of_numbers_are_in_words() {
        for (flag, value, expected) in [
            ("--max-num-seqs", "0", ": it must be at least 1"),
            ("--max-num-seqs", "foo", ": it is not a whole number"),
            ("--max-num-seqs", "", ": it is empty"),
            ("--max-num-seqs", "99999999999999999999", ": it is too large"),
        ] {
            let arg = format!("{flag}={value}");
            let error = Cli::command().try_get_matches_from(["pegainfer", &arg]).unwrap_err().render().to_string();
            let words = in_words(&error).unwrap_or_else(|| panic!("{error}"));
            assert!(words.contains(expected), "{words}");
        }
        let error = Cli::command().try_get_matches_from(["pegainfer", "generate", "x", "--top-p", "x"]).unwrap_err();
        assert!(in_words(&error.render().to_string()).unwrap().contains(": it is not a number"));
        assert_eq!(in_words("another error"), None);
    }
}
