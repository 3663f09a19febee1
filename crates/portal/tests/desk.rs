//! What a desk does with what comes late (protocol rule 22).

use holdfast_base::{BlockData, BlockOp, BlockReply, Buf, Effects, GridId, InstanceId, Instant, RequestToken, Token};
use holdfast_format::portal::{Answer, Ask, LIFETIME_MS, Op, PORTAL, Refusal, TickMs};
use holdfast_format::versions::Versions;
use holdfast_portal::{Binding, Desk, DeskEffect, DeskEvent, LinkId};

const GRID: GridId = GridId(7);

struct Scene {
    desk: Desk,
    now_ms: u64,
    next_token: u64,
}

impl Scene {
    fn new() -> Scene {
        Scene { desk: Desk::new(GRID, "owner"), now_ms: 5_000, next_token: 1 }
    }

    fn tell(&mut self, event: DeskEvent) -> Vec<DeskEffect> {
        let mut out = Effects::new();
        self.desk.handle(Instant(self.now_ms * 1_000_000), event, &mut out);
        out.take()
    }

    fn ask(&mut self, link: u64, ask: Ask) -> Vec<DeskEffect> {
        let token = self.next_token;
        self.next_token += 1;
        let payload = match &ask {
            Ask::Op { op: Op::Write { .. }, .. } => Buf::copy_from(&[7; 512]),
            _ => Buf::empty(),
        };
        self.tell(DeskEvent::Ask { link: LinkId(link), token, ask, payload })
    }

    fn hello(&mut self, link: u64, host: &str, number: u64) -> Vec<DeskEffect> {
        let (versions, grid, instance) = (PORTAL, GRID, InstanceId(1));
        self.ask(link, Ask::Hello { versions, grid, host: host.to_string(), instance, number })
    }

    /// Greets, and attaches session 1.
    fn attach(&mut self, link: u64, host: &str, number: u64, fresh: bool) {
        let greeted = self.hello(link, host, number);
        assert!(matches!(answers(&greeted)[..], [Answer::Hello { .. }]), "{greeted:?}");
        let attached = self.bind(link, fresh);
        assert_eq!(answers(&attached), [Answer::Attached]);
    }

    fn bind(&mut self, link: u64, fresh: bool) -> Vec<DeskEffect> {
        let mut effects = self.ask(link, Ask::Attach { session: 1, export: "vm".to_string(), fresh });
        let guest = effects.iter().find_map(|e| match e {
            DeskEffect::Bind { guest, .. } => Some(*guest),
            _ => None,
        });
        let guest = guest.expect("the export is looked for");
        effects.extend(self.tell(DeskEvent::Bound { guest, binding: Binding::Bound }));
        effects
    }

    fn write(&mut self, link: u64, tick: TickMs) -> Vec<DeskEffect> {
        let crc = holdfast_base::crc32c(&[7; 512]);
        self.ask(link, Ask::Op { session: 1, tick, op: Op::Write { offset: 0, crc } })
    }

    fn done(&mut self, (request, token): (Token, RequestToken)) -> Vec<DeskEffect> {
        let reply = BlockReply { token, result: Ok(BlockData::Done) };
        self.tell(DeskEvent::Reply { request, reply })
    }
}

fn answers(effects: &[DeskEffect]) -> Vec<Answer> {
    let answers = effects.iter().filter_map(|e| match e {
        DeskEffect::Answer { answer, .. } => Some(answer.clone()),
        _ => None,
    });
    answers.collect()
}

fn submitted(effects: &[DeskEffect]) -> Option<(Token, RequestToken)> {
    effects.iter().find_map(|e| match e {
        DeskEffect::Submit { request, block, .. } => {
            assert!(matches!(block.op, BlockOp::Write { .. }));
            Some((*request, block.token))
        }
        _ => None,
    })
}

#[test]
fn what_is_older_than_its_lifetime_is_not_carried_out() {
    let mut scene = Scene::new();
    scene.attach(1, "portal", 1, false);
    let tick = scene.now_ms;
    scene.now_ms += LIFETIME_MS;
    assert!(submitted(&scene.write(1, tick)).is_some(), "as old as it may get");
    scene.now_ms += 1;
    let late = scene.write(1, tick);
    assert_eq!(submitted(&late), None);
    assert_eq!(answers(&late), [Answer::Stale { tick: scene.now_ms }], "with a tick to ask again by");
}

#[test]
fn a_portal_is_greeted_anew_when_nothing_of_its_last_link_is_under_way() {
    let mut scene = Scene::new();
    scene.attach(1, "portal", 1, false);
    let tick = scene.now_ms;
    let request = submitted(&scene.write(1, tick)).expect("it is carried out");
    let greeted = scene.hello(2, "portal", 2);
    assert!(greeted.iter().any(|e| matches!(e, DeskEffect::CloseLink { link: LinkId(1) })), "{greeted:?}");
    assert_eq!(answers(&greeted), [], "the write may still land");
    assert!(submitted(&scene.write(1, tick)).is_none(), "nothing is read of the old link any more");
    let done = scene.done(request);
    assert!(matches!(answers(&done)[..], [Answer::Hello { .. }]), "{done:?}");
    let superseded = scene.hello(3, "portal", 1);
    assert_eq!(answers(&superseded), [Answer::Refused(Refusal::Superseded)], "an older connection that comes late");
}

#[test]
fn a_session_is_detached_and_attached_anew_when_nothing_of_it_is_under_way() {
    let mut scene = Scene::new();
    scene.attach(1, "portal", 1, false);
    let tick = scene.now_ms;
    let request = submitted(&scene.write(1, tick)).expect("it is carried out");
    assert_eq!(answers(&scene.ask(1, Ask::Detach { session: 1 })), []);
    assert_eq!(answers(&scene.bind(1, false)), [], "its number is the same");
    let done = scene.done(request);
    assert_eq!(answers(&done), [Answer::Detached, Answer::Attached]);
}

#[test]
fn a_fresh_session_begins_when_other_portals_have_passed_on_what_they_had() {
    let mut scene = Scene::new();
    scene.attach(1, "one", 1, false);
    scene.hello(2, "two", 1);
    let fresh = scene.bind(2, true);
    let [Answer::Barrier { barrier }] = answers(&fresh)[..] else { panic!("{fresh:?}") };
    assert!(submitted(&scene.write(2, 5_000)).is_none(), "not begun");
    let passed = scene.ask(1, Ask::Passed { barrier });
    assert_eq!(answers(&passed), [Answer::Attached]);

    // One that never says so: what it had is too old by then.
    scene.desk = Desk::new(GRID, "owner");
    scene.attach(3, "one", 1, false);
    scene.hello(4, "two", 1);
    scene.bind(4, true);
    scene.now_ms = scene.desk.next_deadline().expect("a bound").0 / 1_000_000;
    assert!(scene.now_ms >= 5_000 + LIFETIME_MS);
    assert_eq!(answers(&scene.tell(DeskEvent::Tick)), [Answer::Attached]);

    // One that is gone: nothing of it is read any more.
    let own = Token(99);
    let mut effects = scene.tell(DeskEvent::Arrive { session: own });
    effects.extend(scene.tell(DeskEvent::LinkDown { link: LinkId(3) }));
    effects.extend(scene.tell(DeskEvent::LinkDown { link: LinkId(4) }));
    assert!(effects.iter().any(|e| matches!(e, DeskEffect::Admit { session } if *session == own)), "{effects:?}");
}

#[test]
fn a_stranger_is_refused() {
    let mut scene = Scene::new();
    let (host, instance) = ("portal".to_string(), InstanceId(1));
    let other_grid = Ask::Hello { versions: PORTAL, grid: GridId(8), host: host.clone(), instance, number: 1 };
    assert_eq!(answers(&scene.ask(1, other_grid)), [Answer::Refused(Refusal::Grid)]);
    let versions = Versions { oldest: PORTAL.newest + 1, newest: PORTAL.newest + 2 };
    let other_version = Ask::Hello { versions, grid: GRID, host, instance, number: 1 };
    assert_eq!(answers(&scene.ask(2, other_version)), [Answer::Refused(Refusal::Version(PORTAL))]);
    let unasked = scene.ask(3, Ask::Ping);
    assert!(matches!(unasked[..], [DeskEffect::CloseLink { link: LinkId(3) }]), "before its greeting: {unasked:?}");
}
