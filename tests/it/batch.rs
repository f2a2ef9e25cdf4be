//! `gemma4c run --file`: answers are those of `gemma4c run`, in the prompts' order; a run that was cut goes on; a bad
//! line is named before anything runs.

use serde_json::{Value, json};

use crate::common::{Place, golden};

fn place() -> Place {
    let place = Place::new();
    place.ok("synth tiny-e -q q8_0 -o model.gguf");
    place.ok("compile model.gguf -o plan.bin --target cpu --ctx 300");
    place
}

fn prompts(place: &Place, lines: &[Value]) {
    place.write("prompts.jsonl", lines.iter().map(|line| format!("{line}\n")).collect::<String>());
}

fn answers(place: &Place) -> Vec<Value> {
    let text = String::from_utf8(place.read("answers.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn tokens(answer: &Value) -> String {
    let ids = answer["tokens"].as_array().unwrap().iter().map(Value::to_string);
    ids.collect::<Vec<_>>().join(" ")
}

const RUN: &str = "run plan.bin --file prompts.jsonl -o answers.jsonl";

#[test]
fn answers_are_those_of_the_prompts_alone_in_their_order() {
    let place = place();
    let chat = |text: &str| json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]);
    let lines = [
        json!({"prompt": "The sky above", "max_tokens": 30, "temperature": 1.0, "top_k": 5, "top_p": 0.9, "seed": 3}),
        json!({"tokens": [2, 5, 9], "max_tokens": 1, "temperature": 0}),
        json!({"messages": chat("who?"), "max_tokens": 9, "temperature": 0}),
        json!({"prompt": "hello"}),
        json!({"messages": chat("and why?"), "max_tokens": 9, "temperature": 0}),
        json!({"prompt": "nothing", "max_tokens": 0}),
        json!({"tokens": vec![7; 298], "max_tokens": 50, "temperature": 0, "ignore_eos": true}),
    ];
    prompts(&place, &lines);
    place.ok(&format!("{RUN} --sequences 3 -n 12 --temp 0"));
    let answers = answers(&place);
    let text = |i: usize| format!("{}\n", answers[i]["text"].as_str().unwrap());
    assert_eq!(text(0), place.ok("run plan.bin -p 'The sky above' -n 30 --top-k 5 --top-p 0.9 --temp 1 --seed 3"));
    assert_eq!(answers[1]["tokens"].as_array().unwrap().len(), 1);
    let asked = "run plan.bin --chat --system 'Be brief.' -n 9 --temp 0";
    assert_eq!(text(2), place.ok(&format!("{asked} -p 'who?'")));
    assert_eq!(text(3), place.ok("run plan.bin -p hello -n 12 --temp 0"), "what is not said is the command's");
    assert_eq!(text(4), place.ok(&format!("{asked} -p 'and why?'")));
    let hash = &answers[5]["hash"];
    assert_eq!(answers[5], json!({"tokens": [], "text": "", "finish_reason": "length", "hash": hash}));
    assert_eq!((answers[6]["tokens"].as_array().unwrap().len(), &answers[6]["finish_reason"]), (3, &json!("context")));
    assert_eq!(answers.len(), lines.len());
    for how in ["--sequences 1", "--sequences 7", "--sequences 2 --itl 20 --host-cache 4MiB"] {
        let before = place.read("answers.jsonl");
        std::fs::remove_file(place.path("answers.jsonl")).unwrap();
        place.ok(&format!("{RUN} {how} -n 12 --temp 0"));
        assert!(place.read("answers.jsonl") == before, "{how}");
    }
}

#[test]
fn a_run_that_was_cut_goes_on() {
    let place = place();
    prompts(&place, &[5, 6, 7, 8].map(|id| json!({"tokens": [2, id], "max_tokens": 4, "temperature": 0})));
    place.ok(RUN);
    let whole = place.read("answers.jsonl");
    let ends: Vec<usize> = (1..=whole.len()).filter(|end| whole[end - 1] == b'\n').collect();
    for cut in [0, 1, ends[0], ends[0] + 1, ends[2] - 1, ends[2], whole.len() - 1, whole.len()] {
        place.write("answers.jsonl", &whole[..cut]);
        place.ok(RUN);
        assert!(place.read("answers.jsonl") == whole, "cut after {cut} of {} bytes", whole.len());
    }
    // What is there is kept, and not computed again.
    let mut kept = answers(&place).swap_remove(0);
    kept["text"] = json!("kept");
    place.write("answers.jsonl", format!("{kept}\n"));
    assert!(place.run(RUN).stderr.starts_with("[1 kept, 3 answers in "));
    assert!(place.run(RUN).stderr.starts_with("[4 kept, 0 answers in "));
    let answers = answers(&place);
    assert_eq!((answers.len(), &answers[0]), (4, &kept));
    let alone = place.ok("run plan.bin --tokens 2,8 -n 4 --temp 0");
    // Ids on the command line may be any; in a file, tokens of other media are never picked.
    assert_eq!(tokens(&answers[3]), alone.trim_end());
}

#[test]
fn a_bad_line_is_named_before_anything_runs() {
    let place = place();
    let good = json!({"tokens": [2, 3]}).to_string();
    let says = |line: &str, what: &str| {
        place.write("prompts.jsonl", format!("{good}\n\n{line}\n{good}\n"));
        let said = place.refused(RUN);
        assert!(said.contains("prompts.jsonl, line 3: ") && said.contains(what), "{line}\n{said}");
        assert!(!place.path("answers.jsonl").exists(), "nothing was written");
    };
    says("{\"prompt\": \"cut", "it is no JSON");
    says("[1]", "it is no JSON object");
    says("{}", "it has 0 of prompt, messages and tokens");
    says("{\"prompt\": \"a\", \"tokens\": [1]}", "it has 2 of prompt, messages and tokens");
    says("{\"prompt\": 7}", "prompt is no text");
    says("{\"tokens\": \"1,2\"}", "tokens is no list of token ids");
    says("{\"tokens\": [1, -2]}", "-2 is no token id");
    says("{\"tokens\": []}", "no tokens were given");
    says("{\"tokens\": [999999]}", "token 999999 is out of range");
    says(&json!({"tokens": vec![1; 301]}).to_string(), "the prompt has 301 tokens, the context has room for 300");
    says("{\"messages\": []}", "messages is empty");
    says("{\"messages\": [{\"content\": \"a\"}]}", "missing field `role`");
    says("{\"prompt\": \"a\", \"max_token\": 3}", "unknown field \"max_token\"");
    says("{\"prompt\": \"a\", \"max_tokens\": -1}", "max_tokens -1 is no count");
    says("{\"prompt\": \"a\", \"temperature\": \"hot\"}", "temperature \"hot\" is no number");
    says("{\"prompt\": \"a\", \"temperature\": -1}", "a temperature of -1 is out of range");
    says("{\"prompt\": \"a\", \"top_p\": 1.5}", "a top-p of 1.5 is out of range");
    says("{\"prompt\": \"a\", \"top_k\": 1.5}", "top_k 1.5 is no count");
    says("{\"prompt\": \"a\", \"seed\": -1}", "seed -1 is no whole number");
    says("{\"prompt\": \"a\", \"ignore_eos\": 1}", "ignore_eos 1 is neither true nor false");
    says("{\"prompt\": \"a\", \"stop\": [\"b\", 1]}", "stop 1 is no text");
    says("{\"prompt\": \"a\", \"stop\": \"\"}", "stop \"\" is no text");
}

#[test]
fn files_that_do_not_belong_together_are_refused() {
    let place = place();
    prompts(&place, &[json!({"tokens": [2]})]);
    let answer = json!({"tokens": [1], "text": "", "finish_reason": "stop"});
    place.write("answers.jsonl", format!("{answer}\n"));
    assert!(place.refused(RUN).contains("answers.jsonl, line 1: the answer does not say what it is an answer to"));
    place.write("answers.jsonl", "a shopping list\n");
    assert!(place.refused(RUN).contains("answers.jsonl, line 1: this is no answer"));
    assert_eq!(place.read("answers.jsonl"), b"a shopping list\n");
    assert!(place.refused("run plan.bin --file prompts.jsonl -o prompts.jsonl").contains("would be overwritten"));
    assert!(place.refused("run plan.bin --file nothing.jsonl -o answers2.jsonl").contains("cannot read nothing.jsonl"));
    assert!(place.refused("run plan.bin --file prompts.jsonl").contains("--output"));
    assert!(place.refused("run plan.bin -p hello --sequences 2").contains("--file"));
    assert!(place.refused("run plan.bin -p hello --itl 50ms").contains("--itl is for many sequences: it needs --file"));
    std::fs::remove_file(place.path("answers.jsonl")).unwrap();
    assert!(place.refused(&format!("{RUN} --sequences 0")).contains("--sequences 0"));
    // An empty file has no answers.
    place.write("prompts.jsonl", "");
    place.ok(RUN);
    assert_eq!(place.read("answers.jsonl"), b"");
}

/// With other prompts, another plan or other settings an answer is another one: it is neither kept in silence nor
/// replaced.
#[test]
fn answers_are_bound_to_their_questions() {
    let place = place();
    let question = |id: u32| json!({"tokens": [2, id], "max_tokens": 4, "temperature": 0});
    prompts(&place, &[question(5), question(6)]);
    place.ok(RUN);
    let whole = place.read("answers.jsonl");
    let refused = |line: &str, says: &str| {
        let said = place.refused(line);
        assert!(said.contains(says) && said.contains("--restart replaces all answers"), "{line}: {said}");
        assert!(place.read("answers.jsonl") == whole, "{line}: the answers are as they were");
    };
    prompts(&place, &[question(5), question(7)]);
    refused(RUN, "answers.jsonl, line 2: the answer is of another prompt");
    prompts(&place, &[question(5)]);
    refused(RUN, "answers.jsonl, line 2: there are 1 prompts and more answers");
    prompts(&place, &[question(5), json!({"tokens": [2, 6], "max_tokens": 5, "temperature": 0})]);
    refused(RUN, "answers.jsonl, line 2: the answer is of other settings");
    prompts(&place, &[question(5), question(6), question(7)]);
    place.ok("compile model.gguf -o other.bin --target cpu --ctx 200");
    refused(&RUN.replace("plan", "other"), "answers.jsonl, line 1: the answer is of another plan or device");
    // More prompts go on behind the answers that are there; how many are worked on at once is no part of an answer.
    assert!(place.run(&format!("{RUN} --sequences 1")).stderr.starts_with("[2 kept, 1 answers in "));
    assert!(place.read("answers.jsonl").starts_with(&whole));
    prompts(&place, &[question(7)]);
    place.ok(&format!("{RUN} --restart"));
    assert_eq!(answers(&place).len(), 1);
    assert_eq!(place.ok("run plan.bin --file prompts.jsonl -o -").into_bytes(), place.read("answers.jsonl"));
}

/// Of a template that knows no messages of tools: results are in the model's turn, and arguments are those that the
/// model wrote.
#[test]
fn calls_and_results_are_shown_as_the_model_knows_them() {
    let Some(folder) = golden::folder() else { return };
    let place = Place::new();
    let model = folder.join("converted/a_e2b.Q4_K_M.gguf").display().to_string();
    place.ok(&format!("compile {model} -o plan.bin --target cpu --ctx 300"));
    let shown = "<bos><|turn>user\nW?<turn|>\n<|turn>model\nWait.<|tool_call>call:f{x:<|\"|>y<|\"|>}<tool_call|>\
                 <|tool_response>response:f{value:<|\"|>21<|\"|>}<tool_response|><|channel>thought\n<channel|>";
    let ids = place.command("tokenize plan.bin --special --no-bos -p").arg(shown).output().unwrap().stdout;
    let ids: Vec<u32> = String::from_utf8(ids).unwrap().split_whitespace().map(|id| id.parse().unwrap()).collect();
    let call = json!([{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{\"x\": \"y\"}"}}]);
    let messages = json!([{"role": "user", "content": "W?"}, {"role": "assistant", "content": "Wait.", "tool_calls": call},
        {"role": "tool", "tool_call_id": "a", "content": "21"}]);
    prompts(&place, &[json!({"messages": messages}), json!({"tokens": ids}), json!({"prompt": "W?"})]);
    place.ok(&format!("{RUN} -n 12 --temp 0"));
    let answers = answers(&place);
    assert_eq!(tokens(&answers[0]), tokens(&answers[1]));
    assert_ne!(tokens(&answers[0]), tokens(&answers[2]), "an answer depends on what is shown");
}

#[test]
fn a_stop_string_ends_an_answer_as_in_run() {
    let place = place();
    let whole = place.ok("run plan.bin -p 'The sky above' -n 30 --temp 0");
    let stop = whole.trim_end().chars().skip(6).take(3).collect::<String>();
    let line = |stop: Value| json!({"prompt": "The sky above", "max_tokens": 30, "temperature": 0, "stop": stop});
    prompts(&place, &[line(json!(stop)), line(json!(["never said", stop])), line(Value::Null)]);
    place.ok(RUN);
    let answers = answers(&place);
    let mut alone = place.command("run plan.bin -p");
    let alone = alone.args(["The sky above", "-n30", "--temp=0", "--json", "--stop", &stop]).output().unwrap();
    let alone: Value = serde_json::from_slice(&alone.stdout).unwrap();
    for answer in &answers[..2] {
        assert_eq!(answer["finish_reason"], "stop");
        assert_eq!(answer["text"].as_str().unwrap(), whole.split(&stop).next().unwrap());
        assert_eq!((&answer["tokens"], &answer["text"]), (&alone["tokens"], &alone["text"]));
    }
    assert_eq!(answers[2]["text"].as_str().unwrap(), whole.trim_end_matches('\n'));
}

/// Prompts from a pipe, answers to one.
#[test]
fn prompts_may_come_from_standard_input() {
    let place = place();
    prompts(&place, &[json!({"tokens": [2, 5], "max_tokens": 4, "temperature": 0})]);
    place.ok(RUN);
    let mut piped = place.command("run plan.bin --file - -o -");
    let piped = piped.stdin(std::fs::File::open(place.path("prompts.jsonl")).unwrap()).output().unwrap();
    assert_eq!(piped.stdout, place.read("answers.jsonl"));
}
