//! Every option, every policy, every error of the handshake.

use super::*;
use crate::nbd::harness::{Client, OptionReply, SIZE_BYTES, contexts, export, info_data, option_bytes};

fn plain(exports: &[&str]) -> Client {
    Client::new(SessionConfig::default(), exports)
}

fn with_tls(tls: TlsPolicy) -> Client {
    Client::new(SessionConfig { tls, ..SessionConfig::default() }, &["vm"])
}

fn kinds(replies: &[OptionReply]) -> Vec<u32> {
    replies.iter().map(|(kind, _)| *kind).collect()
}

/// The number of an export's information, as it is sent for an ordinary export.
fn export_info(flags: u16) -> OptionReply {
    (reply::INFO, [&[0, 0][..], &SIZE_BYTES.to_be_bytes(), &flags.to_be_bytes()].concat())
}

const ACK: OptionReply = (reply::ACK, Vec::new());

#[test]
fn an_export_opens_by_its_oldest_option() {
    let mut client = Client::connect(SessionConfig::default(), &["vm"]);
    client.say(&[0, 0, 0, 0]);
    let sent = client.say(&option_bytes(option::EXPORT_NAME, b"vm"));
    // Size 1 GiB; flags 0x0d6d; 124 zeroes, as the client did not decline them.
    assert_eq!(sent[..10], *b"\0\0\0\0\x40\0\0\0\x0d\x6d");
    assert_eq!(sent[10..], [0; 124]);
    let mut client = plain(&["vm"]);
    assert_eq!(client.say(&option_bytes(option::EXPORT_NAME, b"vm")).len(), 10);
    assert_eq!(client.opened, ["vm"]);
    assert!(client.session.wants_input());
}

#[test]
fn an_export_that_is_not_there_closes_where_no_error_can_be_told() {
    for name in [&b"other"[..], b"\xff", &[b'x'; 5000], &[b'x'; OPTION_DATA_BYTES_MAX as usize + 1]] {
        let mut client = plain(&["vm"]);
        assert!(client.say(&option_bytes(option::EXPORT_NAME, name)).is_empty());
        assert!(client.closed && client.opened.is_empty());
    }
    let mut client = plain(&["vm"]);
    client.refusal = Some(Refusal { kind: RefusalKind::Forbidden, message: "no".to_owned() });
    assert!(client.say(&option_bytes(option::EXPORT_NAME, b"vm")).is_empty());
    assert!(client.closed);
}

#[test]
fn an_export_that_is_not_for_this_client_is_not_listed_and_refused_with_the_reason() {
    let mut client = plain(&["others-disk", "vm"]);
    let listed = client.option(option::LIST, b"");
    assert_eq!(kinds(&listed), [reply::SERVER, reply::ACK]);
    assert!(listed[0].1.ends_with(b"vmdisk of vm"));
    let refused = vec![(reply::ERR_POLICY, b"others-disk is not for you; ask for it".to_vec())];
    assert_eq!(client.option(option::STRUCTURED_REPLY, b""), [ACK]);
    for option in [option::INFO, option::GO] {
        assert_eq!(client.option(option, &info_data("others-disk", &[])), refused);
    }
    for option in [option::LIST_META_CONTEXT, option::SET_META_CONTEXT] {
        assert_eq!(client.option(option, &contexts("others-disk", &["base:allocation"])), refused);
    }
    // The empty name stands for the only one that the client may have.
    assert_eq!(client.option(option::INFO, &info_data("", &[])).last(), Some(&ACK));
    assert!(client.opened.is_empty() && !client.closed);
    assert!(client.say(&option_bytes(option::EXPORT_NAME, b"others-disk")).is_empty());
    assert!(client.closed && client.opened.is_empty());
}

#[test]
fn client_flags_must_be_known() {
    for flags in [4u32, 1 << 16, u32::MAX] {
        let mut client = Client::connect(SessionConfig::default(), &["vm"]);
        assert!(client.say(&flags.to_be_bytes()).is_empty());
        assert!(client.closed && !client.session.wants_input());
    }
}

#[test]
fn a_client_of_the_first_newstyle_may_only_open() {
    let mut client = Client::connect(SessionConfig::default(), &["vm"]);
    client.say(&[0, 0, 0, 2]);
    client.say(&option_bytes(option::LIST, b""));
    assert!(client.closed);
}

#[test]
fn a_broken_stream_closes() {
    let mut client = plain(&["vm"]);
    assert!(client.say(b"IHAVEOPX\0\0\0\x03\0\0\0\0and more").is_empty());
    assert!(client.closed);
    assert_eq!(client.session.held_bytes(), 0);
    assert!(client.say(&option_bytes(option::LIST, b"")).is_empty(), "nothing follows the end");
}

#[test]
fn abort_is_acknowledged_whatever_it_carries() {
    for len in [0, 9, OPTION_DATA_BYTES_MAX as usize + 9] {
        let mut client = plain(&["vm"]);
        assert_eq!(client.option(option::ABORT, &vec![7; len]), [ACK]);
        assert!(client.closed);
    }
}

#[test]
fn list_names_and_describes_every_export() {
    let mut client = plain(&["vm", "ro"]);
    let entry = |text: &[u8]| (reply::SERVER, text.to_vec());
    assert_eq!(
        client.option(option::LIST, b""),
        [entry(b"\0\0\0\x02vmdisk of vm"), entry(b"\0\0\0\x02rodisk of ro"), ACK]
    );
    assert_eq!(kinds(&client.option(option::LIST, b"x")), [reply::ERR_INVALID]);
    assert_eq!(plain(&[]).option(option::LIST, b""), [ACK]);
}

#[test]
fn unknown_options_are_refused_and_haggling_goes_on() {
    let mut client = plain(&["vm"]);
    for option in [4, 11, 12, 0, u32::MAX] {
        assert_eq!(kinds(&client.option(option, b"some data")), [reply::ERR_UNSUP]);
        let long = vec![0; OPTION_DATA_BYTES_MAX as usize + 1];
        assert_eq!(kinds(&client.option(option, &long)), [reply::ERR_UNSUP]);
    }
    assert_eq!(client.option(option::STRUCTURED_REPLY, b""), [ACK]);
}

#[test]
fn oversized_options_are_skipped_and_refused() {
    let mut client = plain(&["vm"]);
    let long = vec![0; OPTION_DATA_BYTES_MAX as usize + 1];
    for option in [3, 5, 6, 7, 8, 9, 10] {
        assert_eq!(kinds(&client.option(option, &long)), [reply::ERR_TOO_BIG]);
    }
    assert_eq!(kinds(&client.option(option::INFO, &long[1..])), [reply::ERR_INVALID], "kept, and found wrong");
    assert_eq!(client.option(option::STRUCTURED_REPLY, b""), [ACK]);
}

#[test]
fn info_tells_what_was_asked_for_and_go_opens() {
    let mut client = plain(&["vm", "ro"]);
    assert_eq!(client.option(option::INFO, &info_data("vm", &[])), [export_info(0x0d6d), ACK]);
    assert_eq!(client.option(option::INFO, &info_data("ro", &[])), [export_info(0x050f), ACK]);
    let all = [
        export_info(0x0d6d),
        (reply::INFO, b"\0\x01vm".to_vec()),
        (reply::INFO, b"\0\x02disk of vm".to_vec()),
        (reply::INFO, b"\0\x03\0\0\0\x01\0\0\x10\0\x02\0\0\0".to_vec()),
        ACK,
    ];
    assert_eq!(client.option(option::INFO, &info_data("vm", &[3, 2, 1, 0, 77])), all);
    assert!(client.opened.is_empty());
    assert_eq!(client.option(option::GO, &info_data("vm", &[3, 2, 1])), all);
    assert_eq!(client.opened, ["vm"]);
}

#[test]
fn structured_replies_show_in_the_flags() {
    let mut client = plain(&["vm"]);
    assert_eq!(kinds(&client.option(option::STRUCTURED_REPLY, b"x")), [reply::ERR_INVALID]);
    assert_eq!(client.option(option::STRUCTURED_REPLY, b""), [ACK]);
    assert_eq!(client.option(option::INFO, &info_data("vm", &[])), [export_info(0x0ded), ACK]);
}

#[test]
fn a_description_that_is_not_there_is_not_sent() {
    let mut client = plain(&["vm"]);
    client.exports[0].description.clear();
    assert_eq!(client.option(option::INFO, &info_data("vm", &[2])), [export_info(0x0d6d), ACK]);
    assert_eq!(client.option(option::LIST, b"")[0].1, b"\0\0\0\x02vm");
}

#[test]
fn wrong_names_and_malformed_data_leave_the_client_a_choice() {
    let mut client = plain(&["vm"]);
    for option in [option::INFO, option::GO] {
        assert_eq!(kinds(&client.option(option, &info_data("other", &[]))), [reply::ERR_UNKNOWN]);
        assert_eq!(kinds(&client.option(option, b"\0\0\0\x09vm\0\0")), [reply::ERR_INVALID]);
        assert_eq!(kinds(&client.option(option, b"")), [reply::ERR_INVALID]);
    }
    assert_eq!(client.option(option::GO, &info_data("vm", &[])).last(), Some(&ACK));
}

#[test]
fn the_shell_may_refuse_an_export() {
    let mut client = plain(&["vm"]);
    for (kind, expected) in [
        (RefusalKind::Unknown, reply::ERR_UNKNOWN),
        (RefusalKind::Forbidden, reply::ERR_POLICY),
        (RefusalKind::ShuttingDown, reply::ERR_SHUTDOWN),
    ] {
        client.refusal = Some(Refusal { kind, message: "vm is attached elsewhere".to_owned() });
        let replies = client.option(option::GO, &info_data("vm", &[1]));
        assert_eq!(replies, [(expected, b"vm is attached elsewhere".to_vec())]);
    }
    assert_eq!(client.option(option::GO, &info_data("vm", &[])).last(), Some(&ACK));
}

#[test]
fn an_export_is_served_as_it_is_when_it_opens() {
    let mut client = plain(&["vm"]);
    client.session.on_bytes(&option_bytes(option::GO, &info_data("vm", &[])), &client.exports, &mut client.out);
    assert!(!client.session.wants_input(), "the shell is being asked");
    let [Effect::Open { export: name }] = &client.out.take()[..] else { panic!("the export opens first") };
    let resized = ExportInfo { size_bytes: 2 * SIZE_BYTES, ..export(name) };
    client.session.on_opened(Ok(resized), &client.exports, &mut client.out);
    let sent = client.carry_out();
    assert_eq!(sent[22..30], (2 * SIZE_BYTES).to_be_bytes());
    client.request(0, 0, 2 * SIZE_BYTES - 1, 1, b"");
    assert_eq!(client.requests.len(), 1);
}

#[test]
fn the_empty_name_stands_for_the_only_export_or_the_chosen_one() {
    let opens = |client: &mut Client| kinds(&client.option(option::INFO, &info_data("", &[1])));
    assert_eq!(opens(&mut plain(&["vm"])), [reply::INFO, reply::INFO, reply::ACK]);
    assert_eq!(opens(&mut plain(&["vm", "ro"])), [reply::ERR_UNKNOWN]);
    assert_eq!(opens(&mut plain(&[])), [reply::ERR_UNKNOWN]);
    let chosen = SessionConfig { default_export: Some("ro".to_owned()), ..SessionConfig::default() };
    let mut client = Client::new(chosen.clone(), &["vm", "ro"]);
    assert_eq!(client.option(option::GO, &info_data("", &[1]))[1].1, b"\0\x01ro");
    assert_eq!(client.opened, ["ro"]);
    assert_eq!(opens(&mut Client::new(chosen, &["vm"])), [reply::ERR_UNKNOWN]);
}

#[test]
fn contexts_are_listed_and_selected_by_query() {
    let mut client = plain(&["vm"]);
    for option in [option::LIST_META_CONTEXT, option::SET_META_CONTEXT] {
        assert_eq!(kinds(&client.option(option, &contexts("vm", &[]))), [reply::ERR_INVALID], "not structured");
    }
    client.option(option::STRUCTURED_REPLY, b"");
    let replies = |names: &[&str], is_selected: bool| -> Vec<OptionReply> {
        let id = |at: usize| if is_selected { at as u32 + 1 } else { 0 };
        let one = |(at, name): (usize, &&str)| [&id(at).to_be_bytes(), name.as_bytes()].concat();
        let named = names.iter().enumerate().map(|named| (reply::META_CONTEXT, one(named)));
        named.chain([ACK]).collect()
    };
    const ALLOCATION: &str = "base:allocation";
    const CHANGED: [&str; 2] = ["holdfast:changed:monday", "holdfast:changed:tuesday"];
    for (queries, lists, selects) in [
        (&[][..], &[ALLOCATION, CHANGED[0], CHANGED[1]][..], &[][..]),
        (&["base:"], &[ALLOCATION], &[]),
        (&["holdfast:"], &CHANGED, &[]),
        (&["holdfast:changed:"], &CHANGED, &[]),
        (&[ALLOCATION], &[ALLOCATION], &[ALLOCATION]),
        (&["x-other:y", ALLOCATION, ALLOCATION], &[ALLOCATION], &[ALLOCATION]),
        (&[CHANGED[1], ALLOCATION], &[ALLOCATION, CHANGED[1]], &[CHANGED[1], ALLOCATION]),
        (&["base:other", "qemu:dirty-bitmap:b", "holdfast:changed:sunday", "nonsense", ""], &[], &[]),
    ] {
        let data = contexts("vm", queries);
        assert_eq!(client.option(option::LIST_META_CONTEXT, &data), replies(lists, false), "{queries:?}");
        assert_eq!(client.option(option::SET_META_CONTEXT, &data), replies(selects, true), "{queries:?}");
    }
    for option in [option::LIST_META_CONTEXT, option::SET_META_CONTEXT] {
        assert_eq!(kinds(&client.option(option, &contexts("other", &[]))), [reply::ERR_UNKNOWN]);
        assert_eq!(kinds(&client.option(option, b"\0\0\0\x02vm\0\0\0\x01")), [reply::ERR_INVALID]);
    }
}

/// Whether a status reaches the volume, after these options and `GO`.
fn has_status(client: &mut Client, go: &str) -> bool {
    assert_eq!(client.option(option::GO, &info_data(go, &[])).last(), Some(&ACK));
    client.request(0, 7, 0, 4096, b"");
    !client.requests.is_empty()
}

#[test]
fn a_context_holds_for_its_export_until_selected_anew() {
    let select = |client: &mut Client, name: &str, queries: &[&str]| {
        client.option(option::STRUCTURED_REPLY, b"");
        client.option(option::SET_META_CONTEXT, &contexts(name, queries));
    };
    let mut client = plain(&["vm"]);
    select(&mut client, "", &["base:allocation"]);
    assert!(has_status(&mut client, "vm"), "both names are one export");
    let mut client = plain(&["vm", "ro"]);
    select(&mut client, "vm", &["base:allocation"]);
    assert!(!has_status(&mut client, "ro"), "selected for another export");
    for (name, queries) in [("vm", &[][..]), ("other", &["base:allocation"])] {
        let mut client = plain(&["vm"]);
        select(&mut client, "vm", &["base:allocation"]);
        select(&mut client, name, queries);
        assert!(!has_status(&mut client, "vm"), "replaced, even by a failure");
    }
}

#[test]
fn tls_is_refused_where_it_is_not_configured() {
    let mut client = plain(&["vm"]);
    assert_eq!(kinds(&client.option(option::STARTTLS, b"")), [reply::ERR_POLICY]);
    assert!(!client.securing);
}

#[test]
fn tls_starts_once_and_forgets_what_was_agreed() {
    let mut client = with_tls(TlsPolicy::Offered);
    client.option(option::STRUCTURED_REPLY, b"");
    client.option(option::SET_META_CONTEXT, &contexts("vm", &["base:allocation"]));
    assert_eq!(kinds(&client.option(option::STARTTLS, b"x")), [reply::ERR_INVALID]);
    client.session.on_bytes(&option_bytes(option::STARTTLS, b""), &client.exports, &mut client.out);
    assert!(matches!(client.out.as_slice(), [Effect::SendBuf(_), Effect::StartTls]), "the answer is still plain");
    client.carry_out();
    assert!(!client.session.wants_input(), "the shell shakes hands first");
    client.session.on_tls_started();
    assert!(client.session.wants_input());
    assert_eq!(kinds(&client.option(option::STARTTLS, b"")), [reply::ERR_INVALID], "a second time");
    assert_eq!(kinds(&client.option(option::LIST_META_CONTEXT, &contexts("vm", &[]))), [reply::ERR_INVALID]);
    assert!(!has_status(&mut client, "vm"));
}

#[test]
fn plain_bytes_behind_starttls_close() {
    let mut client = with_tls(TlsPolicy::Offered);
    client.say(&[option_bytes(option::STARTTLS, b""), option_bytes(option::LIST, b"")].concat());
    assert!(client.closed);
    client.session.on_tls_started();
    assert!(!client.session.wants_input());
}

#[test]
fn nothing_is_told_before_tls_where_it_is_required() {
    let mut client = with_tls(TlsPolicy::Required);
    for option in [3, 6, 7, 8, 9, 10, 11, 99] {
        assert_eq!(kinds(&client.option(option, b"")), [reply::ERR_TLS_REQD]);
        let long = vec![0; OPTION_DATA_BYTES_MAX as usize + 1];
        assert_eq!(kinds(&client.option(option, &long)), [reply::ERR_TLS_REQD]);
    }
    assert_eq!(client.option(option::STARTTLS, b""), [ACK]);
    client.session.on_tls_started();
    assert_eq!(client.option(option::GO, &info_data("vm", &[])).last(), Some(&ACK));
    let mut client = with_tls(TlsPolicy::Required);
    client.say(&option_bytes(option::EXPORT_NAME, b"vm"));
    assert!(client.closed && client.opened.is_empty());
    assert_eq!(with_tls(TlsPolicy::Required).option(option::ABORT, b""), [ACK]);
}

#[test]
fn a_server_that_stops_says_so() {
    let mut client = with_tls(TlsPolicy::Offered);
    client.session.on_shutdown(&mut client.out);
    for option in [3, 5, 6, 7, 8, 9, 10] {
        assert_eq!(kinds(&client.option(option, b"")), [reply::ERR_SHUTDOWN]);
    }
    assert_eq!(client.option(option::ABORT, b""), [ACK]);
    assert!(client.closed);
    client.session.on_shutdown(&mut client.out);
    assert!(client.out.is_empty());
}

#[test]
fn a_server_that_stops_while_it_opens_an_export_refuses_it() {
    for (option, data) in [(option::GO, info_data("vm", &[])), (option::EXPORT_NAME, b"vm".to_vec())] {
        let mut client = plain(&["vm"]);
        client.session.on_bytes(&option_bytes(option, &data), &client.exports, &mut client.out);
        client.session.on_shutdown(&mut client.out);
        client.out.take();
        client.session.on_opened(Ok(export("vm")), &client.exports, &mut client.out);
        let sent = client.carry_out();
        if option == option::GO {
            assert_eq!(sent[12..16], reply::ERR_SHUTDOWN.to_be_bytes());
            assert!(client.session.wants_input(), "the client may say goodbye");
        } else {
            assert!(sent.is_empty() && client.closed);
        }
    }
}

#[test]
fn options_wait_for_a_client_that_does_not_read() {
    let config = SessionConfig { held_bytes_max: 200, ..SessionConfig::default() };
    let mut client = Client::new(config, &["vm"]);
    client.reads = false;
    let list = option_bytes(option::LIST, b"");
    let sent = client.say(&list.repeat(100));
    assert!((200..300).contains(&sent.len()), "{} bytes", sent.len());
    assert!(!client.session.wants_input());
    client.reads = true;
    let rest = client.carry_out();
    assert_eq!(rest.len() + sent.len(), 100 * (20 + 16 + 20));
    assert!(client.session.wants_input());
}

#[test]
fn an_option_whose_export_is_elsewhere_is_answered_there_and_what_follows_waits() {
    for option in [option::INFO, option::GO, option::EXPORT_NAME] {
        let mut client = plain(&["vm"]);
        let data = if option == option::EXPORT_NAME { b"far-1".to_vec() } else { info_data("far-1", &[]) };
        assert!(!client.say(&option_bytes(option, &data)).is_empty(), "{option}");
        assert!(!client.closed && client.exports.iter().any(|export| export.name == "far-1"));
        assert_eq!(client.opened.is_empty(), option == option::INFO);
    }
    // In one piece, and byte by byte.
    let bytes = [option_bytes(option::INFO, &info_data("far-2", &[])), option_bytes(option::LIST, b"")].concat();
    let mut client = plain(&["vm"]);
    let whole = client.say(&bytes);
    assert!(whole.ends_with(&[0, 0, 0, 1, 0, 0, 0, 0]), "the list is acknowledged last");
    let mut client = plain(&["vm"]);
    let pieces: Vec<u8> = bytes.iter().flat_map(|byte| client.say(&[*byte])).collect();
    assert_eq!(whole, pieces);
    let mut client = plain(&["vm"]);
    assert_eq!(client.option(option::STRUCTURED_REPLY, b""), [ACK]);
    assert_eq!(client.option(option::SET_META_CONTEXT, &contexts("far-3", &["base:allocation"])).len(), 2);
    assert_eq!(client.option(option::GO, &info_data("far-3", &[])).last(), Some(&ACK));
    assert_eq!(client.opened, ["far-3"]);
    // Nothing is told of it before TLS.
    let mut client = with_tls(TlsPolicy::Required);
    assert_eq!(kinds(&client.option(option::INFO, &info_data("far-1", &[]))), [reply::ERR_TLS_REQD]);
    assert!(client.exports.iter().all(|export| export.name != "far-1"));
}
