//! Formats of strings that are enforced, as regular expressions. Others say something to people alone, as the standard
//! has it.

const DATE: &str = r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)";
const TIME: &str =
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
const OCTET: &str = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
const LABEL: &str = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?";
const HEX: &str = "[0-9A-Fa-f]";

/// What a text of a format is, and how long it may be at most.
pub fn format(name: &str) -> Option<(String, Option<u64>)> {
    let hostname = || format!(r"{LABEL}(?:\.{LABEL})*");
    let regex = match name {
        "date" => DATE.into(),
        "time" => TIME.into(),
        "date-time" => format!("{DATE}[tT]{TIME}"),
        "duration" => duration(),
        "email" => {
            let word = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+";
            format!(r"{word}(?:\.{word})*@{}", hostname())
        }
        "hostname" => return Some((hostname(), Some(253))),
        "ipv4" => format!(r"{OCTET}(?:\.{OCTET}){{3}}"),
        "ipv6" => ipv6(),
        "uuid" => format!("{HEX}{{8}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{12}}"),
        "uri" => uri(),
        _ => return None,
    };
    Some((regex, None))
}

fn duration() -> String {
    let n = "[0-9]{1,9}";
    let time = format!("T(?:{n}H(?:{n}M(?:{n}S)?)?|{n}M(?:{n}S)?|{n}S)");
    format!("P(?:{n}W|(?:{n}Y(?:{n}M(?:{n}D)?)?|{n}M(?:{n}D)?|{n}D)(?:{time})?|{time})")
}

fn ipv6() -> String {
    let group = format!("{HEX}{{1,4}}");
    let mut ways = vec![format!("(?:{group}:){{7}}{group}")];
    // `before` groups, then `::`, then as many as there is still place for.
    for before in 0..=7 {
        let head = match before {
            0 => String::new(),
            1 => group.clone(),
            _ => format!("{group}(?::{group}){{{}}}", before - 1),
        };
        ways.push(match 7 - before {
            0 => format!("{head}::"),
            1 => format!("{head}::(?:{group})?"),
            after => format!("{head}::(?:{group}(?::{group}){{0,{}}})?", after - 1),
        });
    }
    format!("(?:{})", ways.join("|"))
}

/// Hosts are names or addresses of four numbers, and nobody logs in.
fn uri() -> String {
    let plain = r"A-Za-z0-9._~!$&'()*+,;=:@\-";
    let any = |also: &str| format!("(?:[{plain}{also}]|%{HEX}{{2}})*");
    let (path, more) = (any("/"), any("/?"));
    let place = format!("//[A-Za-z0-9.-]+(?::[0-9]+)?(?:/{path})?|/?[{plain}]{path}");
    format!(r"[A-Za-z][A-Za-z0-9+.-]*:(?:{place})(?:\?{more})?(?:#{more})?")
}
