// A message that was taken leaves the box, one that was refused comes back; what was typed since stays.
({ taken, back }, typed) => {
  if (back) return typed && typed !== back ? `${back}\n${typed}` : back;
  return taken && typed.startsWith(taken) ? typed.slice(taken.length).replace(/^\n/, "") : typed;
}
