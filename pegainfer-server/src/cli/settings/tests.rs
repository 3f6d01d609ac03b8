use super::*;
use crate::cli::{Cli, Command as Selected, serve_args::ServeArgs};
use clap::CommandFactory;
use clap::error::ErrorKind;
use pegainfer_models::args::LogFormat;
use pegainfer_testing::TempDir;
use std::path::Path;

/// Parses with these variables in the environment.
fn parse_with(args: &[&str], variables: &[(&str, &str)]) -> Result<Selected, ParseError> {
    let args = ["pegainfer"].iter().chain(args).map(OsString::from).collect();
    let variable = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
    parse::<Cli>(args, variable).map(Cli::into_command)
}

fn serve(args: &[&str], variables: &[(&str, &str)]) -> ServeArgs {
    match parse_with(args, variables) {
        Ok(Selected::Serve(serve)) => *serve,
        other => panic!("{args:?} {variables:?} gives {other:?}"),
    }
}

/// The sentence about a setting that cannot be used.
fn refused(args: &[&str], variables: &[(&str, &str)]) -> String {
    match parse_with(args, variables) {
        Err(ParseError::Setting(sentence)) => sentence,
        other => panic!("{args:?} {variables:?} gives {other:?}"),
    }
}

fn with_file(dir: &TempDir, text: &str) -> String {
    let path = dir.path().join("pegainfer.toml");
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Every flag of every command, with the path of the command.
fn flags(command: &clap::Command) -> Vec<(String, String)> {
    let own = command.get_arguments().filter(|arg| is_setting(arg)).filter_map(|arg| arg.get_long());
    let own = own.map(|long| (command.get_name().to_owned(), long.to_owned()));
    own.chain(command.get_subcommands().flat_map(flags)).collect()
}

#[test]
fn no_flag_takes_the_variable_of_something_else() {
    let flags = flags(&Cli::command());
    assert!(flags.len() > 100, "{}", flags.len());
    for (command, long) in flags {
        let name = variable_name(&long);
        let taken = OTHER_VARIABLES.contains(&name.as_str()) || name.starts_with("PEGAINFER_TEST_");
        assert!(!taken, "{command} --{long}");
    }
}

#[test]
fn misspelt_variables_are_found() {
    let set = ["PATH", "PEGAINFER_PORT", "PEGAINFER_CONFIG", "PEGAINFER_CUDA", "PEGAINFER_TEST_SEED"];
    let links = ["PEGAINFER_SERVICE_PORT_HTTP", "PEGAINFER_PORT_8000_TCP_ADDR"];
    let wrong = ["PEGAINFER_MAX_NUM_SEQ", "PEGAINFER_ZZZ"];
    let variables = set.iter().chain(&links).chain(&wrong).map(OsString::from);
    let expected = [
        "PEGAINFER_MAX_NUM_SEQ is not a known setting; did you mean PEGAINFER_MAX_NUM_SEQS?",
        "PEGAINFER_ZZZ is not a known setting",
    ];
    assert_eq!(unknown_variables(&Cli::command(), variables), expected);
}

#[test]
fn the_command_line_overrides_the_environment_and_that_the_file() {
    let dir = TempDir::new("settings");
    let file =
        with_file(&dir, "port = 1\nhost = \"0.0.0.0\"\nstrict = true\ncuda-graph = false\nmax-body-size = \"1M\"");
    let serve = serve(&["--config", &file, "--port", "3"], &[("PEGAINFER_PORT", "2"), ("PEGAINFER_HOST", "::1")]);
    assert_eq!((serve.port, serve.host.as_str(), serve.strict, serve.engine.cuda_graph), (3, "::1", true, false));
    assert_eq!(serve.http.max_body_size, Some(1 << 20));
}

#[test]
fn variables_set_flags_of_every_command() {
    let set = [("PEGAINFER_LOG_FORMAT", "json"), ("PEGAINFER_STRICT", "1"), ("PEGAINFER_THREADS", "")];
    for args in [&[][..], &["serve"]] {
        let serve = serve(args, &set);
        assert_eq!((serve.engine.log_format, serve.strict, serve.engine.threads), (LogFormat::Json, true, None));
    }
    assert!(!serve(&[], &[("PEGAINFER_STRICT", "off")]).strict);
    let Ok(Selected::Plan(plan)) = parse_with(&["plan"], &[("PEGAINFER_BATCH", "7"), ("PEGAINFER_PORT", "x")]) else {
        panic!("a variable of another command is in the way")
    };
    assert_eq!(plan.batch.get(), 7);
    let args = ["generate", "--temperature", "0", "--", "--prompt"];
    let Ok(Selected::Generate(generate)) = parse_with(&args, &[("PEGAINFER_SEED", "5")]) else { panic!() };
    assert_eq!((generate.seed, generate.prompt.as_deref()), (Some(5), Some("--prompt")));
    let keys = serve(&[], &[("PEGAINFER_API_KEY", "sk-1")]).http.api_key;
    assert_eq!(keys.len(), 1);
}

#[test]
fn an_invalid_command_line_is_not_blamed_on_a_variable() {
    for args in [&["--port", "abc"][..], &["serve", "--port=abc"]] {
        let result = parse_with(args, &[("PEGAINFER_PORT", "2")]);
        assert!(matches!(result, Err(ParseError::CommandLine(_))), "{result:?}");
    }
}

#[test]
fn a_kubernetes_service_link_is_not_the_port() {
    assert_eq!(serve(&[], &[("PEGAINFER_PORT", "tcp://10.0.0.1:80")]).port, 8000);
}

#[test]
fn help_and_version_need_no_valid_settings() {
    for args in [&["--help"][..], &["--version"], &["help", "serve"], &["serve", "--help"]] {
        let Err(ParseError::CommandLine(error)) = parse_with(args, &[("PEGAINFER_PORT", "x")]) else {
            panic!("{args:?}")
        };
        assert!(matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion), "{error}");
    }
}

#[test]
fn what_is_wrong_with_a_variable_is_one_sentence_with_its_name() {
    let refused = |name, value| refused(&[], &[(name, value)]);
    let error = refused("PEGAINFER_PORT", "abc");
    assert_eq!(error, "PEGAINFER_PORT has the invalid value \"abc\": it is not a whole number");
    let error = refused("PEGAINFER_LOG_FORMAT", "yaml");
    assert_eq!(error, "PEGAINFER_LOG_FORMAT has the invalid value \"yaml\": use text or json");
    assert_eq!(refused("PEGAINFER_STRICT", "maybe"), "PEGAINFER_STRICT must be true or false, got \"maybe\"");
    let error = refused("PEGAINFER_MAX_BODY_SIZE", "8X");
    assert!(error.starts_with("PEGAINFER_MAX_BODY_SIZE has the invalid value \"8X\": unknown unit"), "{error}");
    let error = refused("PEGAINFER_CONFIG", "/no/such/file");
    assert!(error.starts_with("the configuration file /no/such/file cannot be read: "), "{error}");
}

#[test]
fn what_is_wrong_with_a_file_is_one_sentence_with_the_key() {
    let dir = TempDir::new("bad-settings");
    for (text, expected) in [
        ("prot = 1", "prot is not a known setting; did you mean port?"),
        ("max_num_seqs = 1", "max_num_seqs is not a known setting; did you mean max-num-seqs?"),
        ("xyzzy = 1", "xyzzy is not a known setting; see the flags that --help lists"),
        ("config = \"x\"", "config is not a known setting; see the flags that --help lists"),
        ("port = \"80a\"", "port has the invalid value \"80a\": it is not a whole number"),
        ("port = 70000", "port has the invalid value \"70000\": 70000 is not in 0..=65535"),
        ("strict = \"maybe\"", "strict must be true or false, got \"maybe\""),
        ("cuda-graph = 1", "cuda-graph has the invalid value \"1\": use true or false"),
        ("host = [\"a\", \"b\"]", "host must be one value, got 2"),
        ("gpu-memory-utilization = true", "gpu-memory-utilization has the invalid value \"true\""),
        ("speculative-config = 4", "speculative-config has the invalid value \"4\""),
        ("speculative-config = { method = \"mtp\" }", "speculative-config has the invalid value"),
        ("drain-timeout = -1", "drain-timeout has the invalid value \"-1\": \"-1\" is not a number of seconds"),
        ("log-format = \"yaml\"", "log-format has the invalid value \"yaml\": use text or json"),
        ("[serve]\nport = 1", "the file has no sections such as [serve]: write each setting without one"),
        ("port 1", "line 1 is not valid TOML: "),
        ("port = 1\nport = 2", "line 2 is not valid TOML: duplicate key"),
    ] {
        let path = with_file(&dir, text);
        let error = refused(&["--config", &path], &[]);
        let rest = error.strip_prefix(&format!("{path}: ")).unwrap_or_else(|| panic!("{error}"));
        assert!(rest.starts_with(expected) && !rest.contains('\n'), "{text}: {error}");
    }
}

#[test]
fn an_object_is_a_table_or_json() {
    let dir = TempDir::new("object-settings");
    for text in [
        "speculative-config = { method = \"ngram\", num_speculative_tokens = 4 }",
        "[speculative-config]\nmethod = \"ngram\"\nnum_speculative_tokens = 4",
        "speculative-config = '{\"method\": \"ngram\", \"num_speculative_tokens\": 4}'",
    ] {
        let serve = serve(&["--config", &with_file(&dir, text)], &[]);
        assert_eq!(serve.engine.speculative_config.unwrap().num_tokens, 4, "{text}");
    }
}

#[test]
fn a_file_may_serve_several_commands() {
    let dir = TempDir::new("shared-settings");
    let file = with_file(&dir, "port = 9\nbatch = 3\nallowed-host = [\"a\", \"b\"]\napi-key = \"k\"\n");
    let equals = format!("--config={file}");
    let Ok(Selected::Plan(plan)) = parse_with(&["plan", &equals], &[]) else { panic!() };
    assert_eq!(plan.batch.get(), 3);
    let serve = serve(&["serve"], &[("PEGAINFER_CONFIG", &file)]);
    assert_eq!((serve.port, serve.http.allowed_host), (9, vec!["a".to_owned(), "b".to_owned()]));
}

/// The example of the documentation sets what it says.
#[test]
fn the_documented_example_is_valid() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/configuration.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (_, rest) = page.split_once("```toml\n").unwrap();
    let (example, _) = rest.split_once("```").unwrap();
    let dir = TempDir::new("documented-settings");
    let file = with_file(&dir, example);
    let serve = serve(&["--config", &file], &[]);
    assert_eq!((serve.engine.model_path.as_deref(), serve.port), (Some("Qwen/Qwen3-0.6B"), 8080));
    let keys = example.lines().filter(|line| line.contains(" = ")).count();
    assert!(keys >= 8, "{example}");
}
